"""transformers' Mamba."""

from __future__ import annotations

from typing import Any

from transformers import MambaConfig, MambaForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6}


def case(name: str, **changes: Any) -> Case:
    return Case("transformers_mamba", name, lambda: MambaForCausalLM(MambaConfig(**SIZES | changes)))


CASES = [
    case("published"),
    case("everything", use_bias=True, use_conv_bias=False, conv_kernel=3, time_step_rank=5, tie_word_embeddings=False),
    case("float_stream", residual_in_fp32=False, expand=3, layer_norm_epsilon=1e-3),
]
