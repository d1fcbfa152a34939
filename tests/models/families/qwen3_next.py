"""Qwen3-Next: fused projections, experts in all layers or in some."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.models.families.case import Case
from tests.models.families.qwen3_5 import SPECIAL, TEXT
from tests.models.families.qwen3_5_moe import EXPERTS


def case(name: str, **changes: Any) -> Case:
    config = Qwen3NextConfig(**TEXT | EXPERTS | {"intermediate_size": 24} | changes)
    return Case("qwen3_next", name, lambda: Qwen3NextForCausalLM(config), special=SPECIAL)


CASES = [
    case("published", rope_theta=1e7, partial_rotary_factor=0.25, rope_scaling=None),
    case("some_experts", num_hidden_layers=3, layer_types=None, full_attention_interval=3, decoder_sparse_step=2),
    case("one_dense", mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True, linear_num_key_heads=4),
    case("dense", num_experts=0, tie_word_embeddings=True, linear_num_key_heads=1, linear_value_head_dim=4),
]
