"""transformers' Bamba: Mamba-2, attention in a few layers, gated MLPs."""

from __future__ import annotations

from typing import Any

from transformers import BambaConfig, BambaForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "mamba_n_heads": 8,
    "mamba_d_state": 6,
    "pad_token_id": 0,
}


def case(name: str, **changes: Any) -> Case:
    return Case("bamba", name, lambda: BambaForCausalLM(BambaConfig(**SIZES | changes)))


CASES = [
    case("published"),
    case(
        "everything",
        num_key_value_heads=None,
        attn_layer_indices=[0, 2],
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_n_groups=4,
        mamba_d_conv=3,
        mamba_expand=3,
        mamba_d_head=12,
        hidden_act="gelu",
        time_step_limit=(0.2, 0.6),
        rms_norm_eps=1e-3,
        head_dim=12,
        rope_parameters={"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 1.0},
    ),
    case("recurrent", attn_layer_indices=None, mamba_n_groups=2),
]
