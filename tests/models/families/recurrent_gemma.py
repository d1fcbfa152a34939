"""transformers' RecurrentGemma: recurrent units and attention with a window."""

from __future__ import annotations

from typing import Any

from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "attention_window_size": 5,
    "pad_token_id": 0,
}


def case(name: str, scale: float = 0.25, **changes: Any) -> Case:
    return Case(
        "recurrent_gemma", name, lambda: RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZES | changes)), scale
    )


CASES = [
    # The switches of the published 2B and 9B.
    case("published", num_key_value_heads=1, lru_width=32, attention_window_size=9, logits_soft_cap=8.0),
    case(
        "wide_and_untied",
        lru_width=48,
        attention_bias=True,
        num_key_value_heads=2,
        block_types=["attention", "recurrent"],
        conv1d_width=3,
        tie_word_embeddings=False,
        intermediate_size=49,
        hidden_activation="silu",
    ),
    case(
        "turned_in_full",
        hidden_size=40,
        rms_norm_eps=1e-3,
        hidden_activation="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        head_dim=8,
    ),
    case("no_attention", block_types=["recurrent"], num_hidden_layers=2),
]
