"""Kimi-Linear: KDA, latent attention, experts with a correction; configs as the class and published files have."""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig, KimiLinearForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PUBLISHED: dict[str, Any] = {
    "linear_attn_config": {
        "full_attn_layers": [2],
        "head_dim": 8,
        "kda_layers": [1, 3],
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "rope_theta": 10000.0,
    "use_grouped_topk": True,
    "model_max_length": 64,
}


def case(name: str, **changes: Any) -> Case:
    return Case(
        "kimi_linear",
        name,
        lambda: KimiLinearForCausalLM(KimiLinearConfig(**SIZES | changes)),
        # The router's choice must not hang on rounding, nor the decays be so strong that nothing is remembered.
        special={"A_log": (0.0, 0.3), "e_score_correction_bias": (0.0, 0.3)},
    )


CASES = [
    case("published", **PUBLISHED),
    case(
        "groups",
        num_experts=6,
        n_group=3,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        n_shared_experts=2,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        linear_conv_kernel_dim=3,
    ),
    case(
        "low_rank_queries",
        num_hidden_layers=5,
        q_lora_rank=10,
        qk_rope_head_dim=2,
        attention_bias=True,
        rms_norm_eps=1e-3,
        first_k_dense_replace=0,
    ),
]
