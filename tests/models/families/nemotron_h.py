"""transformers' Nemotron-H: layers of one module each."""

from __future__ import annotations

from typing import Any

from transformers import NemotronHConfig, NemotronHForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "pad_token_id": 0,
}


def case(name: str, special: dict[str, tuple[float, float]] | None = None, **changes: Any) -> Case:
    return Case(
        "nemotron_h", name, lambda: NemotronHForCausalLM(NemotronHConfig(**SIZES | changes)), special=special or {}
    )


CASES = [
    # As Nemotron-H-8B: the pattern of older files.
    case("dense", hybrid_override_pattern="M-*-"),
    # As Nemotron-3-Nano, with the older names of the kinds.
    case("experts", layers_block_type=["mamba", "moe", "attention", "moe"], routed_scaling_factor=2.5),
    # The time steps reach their lower limit.
    case(
        "everything",
        special={"dt_bias": (-2.0, 1.0)},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        time_step_min=0.1,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        mamba_hidden_act="gelu",
        mlp_hidden_act="silu",
        conv_kernel=3,
        n_groups=8,
        mamba_head_dim=12,
        head_dim=12,
        layer_norm_epsilon=1e-3,
        residual_in_fp32=True,
        moe_latent_size=16,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
    ),
    case("one_kind", hybrid_override_pattern="MM"),
]
