"""Qwen3.5 with experts in every layer."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)

from tests.models.families.case import Case
from tests.models.families.qwen3_5 import SPECIAL, TEXT, VISION

EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}


def case(name: str, **changes: Any) -> Case:
    config = Qwen3_5MoeTextConfig(**TEXT | EXPERTS | changes)
    return Case("qwen3_5_moe", name, lambda: Qwen3_5MoeForCausalLM(config), special=SPECIAL)


def with_vision(name: str, tied: bool, **changes: Any) -> Case:
    text = TEXT | EXPERTS | changes
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    return Case("qwen3_5_moe", name, lambda: Qwen3_5MoeForConditionalGeneration(config), special=SPECIAL)


CASES = [
    with_vision("published", tied=False),
    case("text", router_aux_loss_coef=0.003, num_experts=3, num_experts_per_tok=3),
    case(
        "text_tied", tie_word_embeddings=True, attention_bias=True, linear_num_value_heads=2, router_aux_loss_coef=0.0
    ),
]
