"""Shared fixtures: one thread (tiny tensors, shared machines) and one description of every mixer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MIXERS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16},
    "gla_conv": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16, "conv_width": 4},
    "gla_merged": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16, "merged": True},
    "retnet": {"type": "retnet", "num_heads": 2, "key_dim": 8, "value_dim": 16},
    "retnet_merged": {"type": "retnet", "num_heads": 2, "key_dim": 8, "value_dim": 16, "merged": True},
    "delta_net": {"type": "delta_net", "num_heads": 2, "key_dim": 8, "value_dim": 8},
    "gated_delta_net": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8},
    "gla_subheads": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16}
    | {"expansion": {"kind": "headwise", "factor": 2}},
    "delta_net_grafted": {"type": "delta_net", "num_heads": 2, "key_dim": 8, "value_dim": 8}
    | {"expansion": {"kind": "headwise", "factor": 3, "grafted": True}},
    "gated_delta_net_subheads": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 8}
    | {"value_dim": 8, "expansion": {"kind": "headwise", "factor": 2}},
    "mamba2": {"type": "mamba2", "inner_dim": 64, "head_dim": 16, "state_dim": 4},
    "mamba2_groups": {"type": "mamba2", "inner_dim": 64, "head_dim": 16, "state_dim": 4, "groups": 2},
    "attention": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8},
    "attention_window": {"type": "attention", "num_heads": 4, "head_dim": 8, "window": 9},
}
MIXERS["handover"] = {"type": "handover", "old": MIXERS["gla"], "new": MIXERS["mamba2"]}
RECURRENT = {name: mixer for name, mixer in MIXERS.items() if not name.startswith("attention")}


class PlainBytes:
    """The byte tokenizer without special tokens: nothing opens a text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors run fastest on one thread, and bit-exact comparisons need a fixed order of sums."""
    torch.set_num_threads(1)
