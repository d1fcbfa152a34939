"""Layers whose kernels are those in Gluon, run on the CPU, against the plain path in float64: launches and all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from longrecall.ops.triton import launch
from tests.ops.gluon_emulation import install
from tests.ops.test_triton_delta import TOLERANCE, errors, layer_errors, make

pytestmark = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1 for the plain kernels")

DELTA = {"invert_kernel": 1, "walk_kernel": 2, "walk_back_kernel": 1, "keys_kernel": 1}
"""Launches of the delta rule: the chunks are walked once to read and once more to keep what the backward needs."""


@pytest.mark.parametrize("length", [1, 130])
def test_the_delta_rule(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    found = errors(make({"B": 1, "H": 1, "E": 2, "R": 2, "K": 128, "V": 128}, length, torch.bfloat16))
    assert Counter(ran) == DELTA
    assert all(error < TOLERANCE[torch.bfloat16] for error in found.values()), found


@pytest.mark.parametrize(
    "change",
    [
        {"expansion": {"kind": "headwise", "factor": 2, "grafted": True}},
        {"value_heads": 2, "expansion": {"kind": "headwise", "factor": 2}},
    ],
    ids=["grafted", "shared_keys"],
)
def test_a_layer(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    config = {"num_heads": 1, "key_dim": 128, "value_dim": 128} | change
    found = layer_errors(config, 65, torch.bfloat16, monkeypatch)
    # Queries and keys are expanded in the forward, and may be once more in the backward.
    counts = Counter(ran)
    assert counts.pop("forward_kernel") >= 2 == counts.pop("backward_kernel")
    assert counts == DELTA
    # A layer rounds its heads and outputs besides, and a few gradients are small beside the terms they are sums of.
    assert all(error < 2 * TOLERANCE[torch.bfloat16] for error in found.values()), found
