"""transformers' RWKV-4, which halves its stream every few layers outside of training."""

from __future__ import annotations

from typing import Any

from transformers import RwkvConfig, RwkvForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3}


def case(name: str, **changes: Any) -> Case:
    return Case(
        "transformers_rwkv",
        name,
        lambda: RwkvForCausalLM(RwkvConfig(**SIZES | changes)),
        0.35,
        # Shares of the present token, as trained ones are.
        special={"time_mix": (0.5, 0.3), "head.weight": (0.0, 0.5)},
    )


CASES = [
    case("published", num_hidden_layers=4, rescale_every=2, layer_norm_epsilon=1e-3),
    case("other_widths", attention_hidden_size=20, intermediate_size=28, rescale_every=0),
    case("tied", tie_word_embeddings=True, rescale_every=3, context_length=77),
    case("default_rescaling", num_hidden_layers=2),
]
