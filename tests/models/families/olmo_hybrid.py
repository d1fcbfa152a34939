"""OLMo Hybrid: norms before and after blocks, rotary or not, fewer key than value heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SPECIAL = {"A_log": (0.0, 0.5), "dt_bias": (0.5, 0.3)}


class AsPublished(OlmoHybridForCausalLM):
    """Writes what published files have: each convolution whole, norms after attention under their own names.

    The stock class cuts the three convolutions into equal parts, and loads both.
    """

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        path = Path(save_directory) / "model.safetensors"
        save_file(as_published(load_file(path), self.config), path, metadata={"format": "pt"})


AsPublished.__name__ = OlmoHybridForCausalLM.__name__


def as_published(stored: dict[str, Any], config: OlmoHybridConfig) -> dict[str, Any]:
    import torch

    keys = config.linear_num_key_heads * config.linear_key_head_dim
    sizes = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
    for index, kind in enumerate(config.layer_types):
        layer = f"model.layers.{index}."
        if kind == "linear_attention":
            names = [f"{layer}linear_attn.{name}_conv1d.weight" for name in "qkv"]
            whole = torch.cat([stored[name] for name in names])
            stored.update(zip(names, (part.clone() for part in whole.split(sizes)), strict=True))
        else:
            norm = stored.pop(f"{layer}feedforward_layer_norm.weight")
            stored[f"{layer}post_attention_layernorm.weight"] = norm
    return stored


def case(name: str, **changes: Any) -> Case:
    config = OlmoHybridConfig(**SIZES | changes)
    return Case("olmo_hybrid", name, lambda: AsPublished(config), special=SPECIAL)


CASES = [
    case("published", rope_parameters={"rope_theta": None, "rope_type": "default"}),
    case(
        "rotary",
        num_hidden_layers=4,
        layer_types=None,
        num_key_value_heads=2,
        linear_allow_neg_eigval=False,
        rope_parameters={
            "rope_theta": 5e5,
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    case(
        "shared_keys",
        tie_word_embeddings=True,
        attention_bias=True,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-5,
    ),
]
