"""Launches for texts and batches of any length: an axis of a grid but the first has at most 65,535 programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops.convolution.triton import diagonal
from longrecall.ops.convolution.triton import short as convolution
from longrecall.ops.delta_rule.triton import chunked as delta_rule
from longrecall.ops.kernels import launch
from longrecall.ops.retrieval.triton import retrieval

LONG = 5_000_000
"""Tokens: more than 65,535 chunks of 64."""


class Recorder:
    """In place of kernels: remembers the grids."""

    def __init__(self) -> None:
        self.grids: dict[str, tuple[int, ...]] = {}

    def instead_of(self, module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def begin(grid: tuple[int, ...]) -> Callable[..., None]:
            self.grids[name] = grid
            return lambda *_, **__: None

        monkeypatch.setattr(module, name, type("Kernel", (), {"__getitem__": lambda _, grid: begin(grid)})())

    def check(self) -> None:
        for name, grid in self.grids.items():
            assert all(count <= launch.MOST_ROWS for count in grid[1:]), (name, grid)
            assert grid[0] < 2**31, (name, grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_delta_rule_of_a_long_text(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ("invert_kernel", "walk_kernel", "walk_back_kernel", "values_kernel", "keys_kernel")
    recorder = Recorder()
    for name in kernels:
        recorder.instead_of(delta_rule, name, monkeypatch)
    monkeypatch.setattr(delta_rule, "part_sums", lambda out, *_: out[0])
    monkeypatch.setattr(delta_rule, "finish_gates", lambda *_: None)

    def room(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    q, k = (room(1, LONG, 2, 128, kind=dtype) for _ in range(2))
    v, gates = room(1, LONG, 1, 128, kind=dtype), [room(1, LONG, 2) for _ in range(2)]
    inputs = (q, k, v, *gates, room(1, 2), room(1, 2, 128, 128))
    out, final, *solved = delta_rule.forward(0.1, *inputs)
    delta_rule.backward(0.1, inputs, tuple(solved), out.to(dtype), final)
    assert set(recorder.grids) == set(kernels)
    recorder.check()


def test_taps_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    for name in ("diagonal_taps_kernel", "diagonal_gradients_kernel"):
        recorder.instead_of(diagonal, name, monkeypatch)
    rate, angle = (torch.ones(2, 3, device="meta", requires_grad=True) for _ in range(2))
    diagonal.taps(rate, angle, torch.ones(2, 3, 2, device="meta"), LONG).sum().backward()
    assert len(recorder.grids) == 2
    recorder.check()


def test_too_many_rows_are_left_to_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "why_not_tensors", lambda *_: None)
    monkeypatch.setattr(retrieval, "why_not_tensors", lambda *_: None)
    for rows, declined in ((2**16 - 1, False), (2**16, True)):
        x, taps = torch.empty(rows, 64, 64, device="meta"), torch.empty(64, 4, device="meta")
        for reason in (convolution.why_not(x, taps, "silu"), retrieval.why_not(queries=x, vectors=x)):
            assert (reason is not None and "at most 65535 rows" in reason) == declined
        states = torch.empty(rows, 64, 1, device="meta")
        reason = delta_rule.why_not(x[:, :, None], x[:, :, None], x[:, :, None], None, states)
        assert (reason is not None and "at most 65535 states" in reason) == declined
