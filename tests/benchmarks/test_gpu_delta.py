"""The layers that a GPU benchmark times: a peer's has our output, and none is kept while another is measured."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import pytest
import torch

from longrecall.ops import gated_delta_rule

SIZE = (2, 40)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with small layers on the CPU and our op in a peer's place."""
    module = importlib.import_module("gpu_delta")
    for name, value in {"DEVICE": "cpu", "HEADS": 2, "WIDTH": 16, "HIDDEN": 32}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "peers", lambda: {"fla": gated_delta_rule})
    return module


class Kept:
    """Rows that only remember what was measured."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def measure(self, name: str, work: Any) -> None:
        self.values[name] = work()


@pytest.mark.parametrize("factor", [1, 4])
def test_a_layer_with_a_peers_kernel_computes_what_ours_does(benchmark: Any, factor: int) -> None:
    found = {}
    for name in ("ours", "fla"):
        forward, leaves = benchmark.layer(SIZE, factor, name)
        for leaf in leaves:
            leaf.requires_grad_()
        out = forward()
        found[name] = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
    for a, b in zip(found["ours"], found["fla"], strict=True):
        # Ours keeps q and k in float32 where a peer takes bfloat16: 2^-9 for each of a handful of roundings.
        assert (a - b).norm() <= 0.03 * b.norm()


def test_rows_of_layers_and_what_they_leave_behind(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[weakref.ref[torch.Tensor]] = []

    def timed(forward: Any, leaves: list[torch.Tensor], **_: bool) -> int:
        assert not any(reference() is not None for reference in before)
        forward()
        before[:] = [weakref.ref(leaf) for leaf in leaves]
        return len(leaves)

    monkeypatch.setattr(benchmark, "timed", timed)
    rows = Kept()
    benchmark.layers(rows, SIZE, [1, 2, 4], others=(1, 4))
    assert list(rows.values) == ["layer E=1 ours", "layer E=1 fla", "layer E=2 ours", "layer E=4 ours", "layer E=4 fla"]
    assert all(count > 5 for count in rows.values.values())
