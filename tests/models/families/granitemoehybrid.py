"""transformers' Granite 4: Mamba-2 and attention, a shared MLP alone or beside experts."""

from __future__ import annotations

from typing import Any

from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "shared_intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "mamba_n_heads": 8,
    "mamba_d_state": 6,
    "pad_token_id": 0,
}


def case(name: str, special: dict[str, tuple[float, float]] | None = None, **changes: Any) -> Case:
    config = SIZES | changes
    return Case(
        "granitemoehybrid",
        name,
        lambda: GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**config)),
        special=special or {},
    )


CASES = [
    # As Granite-4-H-small.
    case(
        "experts",
        position_embedding_type="nope",
        embedding_multiplier=12,
        logits_scaling=3,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
    ),
    # As Granite-4-H-micro, with rotary positions.
    case(
        "dense",
        special={"lm_head": (0.0, 10.0)},
        num_local_experts=0,
        position_embedding_type="rope",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_n_groups=2,
        attention_multiplier=0.2,
        logits_scaling=49,
    ),
    case(
        "everything",
        num_key_value_heads=None,
        position_embedding_type="rope",
        hidden_act="gelu",
        mamba_conv_bias=False,
        mamba_d_conv=3,
        mamba_expand=3,
        mamba_d_head=12,
        time_step_limit=(0.2, 0.6),
        attention_multiplier=0.3,
        rms_norm_eps=1e-3,
        head_dim=12,
        router_aux_loss_coef=0.0,
    ),
    case("recurrent", layer_types=None, num_local_experts=0),
]
