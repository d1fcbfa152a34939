"""Zamba2: Mamba-2 layers, and blocks of attention and an MLP that several layers share, each with adapters."""

from __future__ import annotations

from typing import Any

from transformers import Zamba2Config, Zamba2ForCausalLM

from tests.models.families.case import VOCABULARY, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 6,
    "n_mamba_heads": 4,
    "num_attention_heads": 4,
    "adapter_rank": 3,
    "pad_token_id": 0,
}


def case(name: str, **changes: Any) -> Case:
    return Case("zamba2", name, lambda: Zamba2ForCausalLM(Zamba2Config(**SIZES | changes)))


CASES = [
    # As in Zamba2-7B: two blocks, one of them used again.
    case(
        "published",
        num_hidden_layers=5,
        layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=2,
        mamba_ngroups=2,
        use_mem_rope=True,
    ),
    # As in Zamba2-1.2B: one block, with adapters of attention.
    case("attention_adapters", use_shared_attention_adapter=True, use_mem_rope=True, mamba_expand=1, time_step_min=0.2),
    case(
        "biases",
        add_bias_linear=True,
        num_key_value_heads=2,
        hidden_act="silu",
        tie_word_embeddings=False,
        mamba_d_conv=3,
        rms_norm_eps=1e-3,
        num_mem_blocks=3,
    ),
]
