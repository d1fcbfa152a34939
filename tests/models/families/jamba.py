"""Jamba: Mamba and attention layers, MLPs and experts, and where each of them stands."""

from __future__ import annotations

from typing import Any

from transformers import JambaConfig, JambaForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "mamba_d_state": 6,
    "pad_token_id": 0,
}


def case(name: str, **changes: Any) -> Case:
    return Case("jamba", name, lambda: JambaForCausalLM(JambaConfig(**SIZES | changes)))


CASES = [
    # As in Jamba 1.5: attention and experts in one layer, every second one with experts.
    case("published", eos_token_id=[2, 5]),
    case(
        "dense",
        num_experts=1,
        num_key_value_heads=4,
        attn_layer_period=2,
        tie_word_embeddings=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        rms_norm_eps=1e-3,
    ),
    case(
        "all_experts",
        num_experts_per_tok=3,
        expert_layer_period=1,
        expert_layer_offset=0,
        router_aux_loss_coef=0.03,
        mamba_dt_rank=5,
        mamba_expand=1,
        mamba_d_conv=3,
        head_dim=6,
    ),
    case("no_attention", attn_layer_period=9, attn_layer_offset=8, expert_layer_period=3, expert_layer_offset=2),
]
