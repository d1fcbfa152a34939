"""Falcon-Mamba: Mamba with norms of the time step, B and C; the published file has a width beside its factor."""

from __future__ import annotations

from typing import Any

from transformers import FalconMambaConfig, FalconMambaForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 6,
    "pad_token_id": 0,
}


def case(name: str, **changes: Any) -> Case:
    return Case("falcon_mamba", name, lambda: FalconMambaForCausalLM(FalconMambaConfig(**SIZES | changes)))


CASES = [
    case("published", expand=16, intermediate_size=64, tie_word_embeddings=False, time_step_rank=5),
    case("biases", expand=3, use_bias=True, use_conv_bias=False, conv_kernel=3, mixer_rms_eps=1e-2),
    case("other_width", intermediate_size=40, layer_norm_epsilon=1e-3, residual_in_fp32=False),
]
