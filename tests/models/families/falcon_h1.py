"""transformers' Falcon-H1: attention and Mamba-2 side by side, a factor at every product."""

from __future__ import annotations

from typing import Any

from transformers import FalconH1Config, FalconH1ForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 8,
    "mamba_d_state": 6,
    "pad_token_id": 0,
}


def case(name: str, **changes: Any) -> Case:
    return Case("falcon_h1", name, lambda: FalconH1ForCausalLM(FalconH1Config(**SIZES | changes)))


MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.25,
    "mlp_multipliers": [0.9, 0.6],
    "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35],
}

CASES = [
    # As Falcon-H1-7B.
    case("published", **MULTIPLIERS, mamba_norm_before_gate=False, rope_parameters={"rope_theta": 1e11}),
    case("norm_before_gate", mamba_rms_norm=True, mamba_n_groups=2, tie_word_embeddings=True),
    case(
        "norm_after_gate",
        **MULTIPLIERS,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_d_ssm=None,
        mamba_expand=3,
        mamba_n_groups=4,
        mamba_d_head=12,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        hidden_act="gelu",
        time_step_limit=(0.2, 0.6),
        rms_norm_eps=1e-3,
        num_key_value_heads=None,
        head_dim=12,
    ),
    case("biased_input", mamba_proj_bias=True),
]
