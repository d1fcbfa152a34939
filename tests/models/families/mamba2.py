"""transformers' Mamba-2, read since the first version: an example of a family's file."""

from __future__ import annotations

from typing import Any

from transformers import Mamba2Config, Mamba2ForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "pad_token_id": 0,
}


def case(name: str, **changes: Any) -> Case:
    return Case("transformers_mamba2", name, lambda: Mamba2ForCausalLM(Mamba2Config(**SIZES | changes)))


CASES = [
    case("one_group", n_groups=1, use_bias=True),
    case("tied", n_groups=2, tie_word_embeddings=True, use_conv_bias=False, time_step_limit=(0.2, 0.6)),
    case("many_groups", n_groups=8, conv_kernel=3, layer_norm_epsilon=1e-3, residual_in_fp32=False),
]
