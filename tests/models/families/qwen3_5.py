"""Qwen3.5: the model that reads images too, and the text model alone; the published switches and the others."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from tests.models.families.case import VOCABULARY, Case

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "patch_size": 2,
}
SPECIAL = {"A_log": (0.0, 0.5), "dt_bias": (0.5, 0.3)}


def case(name: str, **changes: Any) -> Case:
    config = Qwen3_5TextConfig(**TEXT | {"intermediate_size": 24} | changes)
    return Case("qwen3_5", name, lambda: Qwen3_5ForCausalLM(config), special=SPECIAL)


def with_vision(name: str, tied: bool, **changes: Any) -> Case:
    text = TEXT | {"intermediate_size": 24} | changes
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    return Case("qwen3_5", name, lambda: Qwen3_5ForConditionalGeneration(config), special=SPECIAL)


CASES = [
    with_vision(
        "published_small",
        tied=True,
        tie_word_embeddings=True,
        linear_num_value_heads=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
    ),
    with_vision("untied", tied=False, num_hidden_layers=3, layer_types=None, full_attention_interval=2),
    case("text_stretched", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, rms_norm_eps=1e-4),
    case(
        "text_with_biases",
        tie_word_embeddings=True,
        attention_bias=True,
        linear_conv_kernel_dim=3,
        linear_value_head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
]
