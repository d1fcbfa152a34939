"""The table that dispatch follows, from the rows of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.ops import peers

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu_peers.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return importlib.import_module("gpu_peers")


def rows(benchmark: Any, times: dict[int, dict[str, float]], errors: dict[str, list[float]]) -> dict[str, Any]:
    """A run: milliseconds by length and backend, the errors of each backend."""
    found = []
    for length, by_backend in times.items():
        facts = benchmark.facts(benchmark.Case("gated_delta_rule", "head", 8, length, 8, 8, 128, 128))
        found += [{**facts, "backend": b, "gradients": True, "ms": ms} for b, ms in by_backend.items()]
    for backend, worst in errors.items():
        found += [{**facts, "backend": backend, "gradients": True, "worst": x} for x in worst]
    return {"rows": [*found, {"name": "softmax attention", "ms": 1.0}, {"name": "failed", "error": "too slow"}]}


def parsed(lines: list[str]) -> list[peers.Measured]:
    return list(eval(f"[{''.join(lines)}]", {"Measured": peers.Measured, "torch": torch}))


def test_who_is_faster_and_right(benchmark: Any) -> None:
    times = {
        4096: {"ours": 10.0, "fla": 8.0, "flash_qla": 5.0},
        512: {"ours": 1.0, "fla": 0.95, "flash_qla": 2.0},
    }
    right = {"ours": [0.004], "fla": [0.003], "flash_qla": [0.009]}
    long, short = parsed(benchmark.table(rows(benchmark, times, right)))
    assert (long.length, long.states, long.faster) == (4096, 64, ("flash_qla", "fla"))
    assert (short.length, short.faster) == (512, ())  # 5% are within the margin
    call = {
        "q": torch.zeros(8, 1, 8, 128, dtype=torch.bfloat16),
        "v": torch.zeros(8, 1, 8, 128, dtype=torch.bfloat16).requires_grad_(),
        "log_decay": torch.zeros(8, 1, 8),
        "beta": torch.zeros(8, 1, 8),
    }
    assert peers._kind(peers.describe("gated_delta_rule", call)) == peers._kind(long)


@pytest.mark.parametrize("wrong", [[0.003, 0.2], [float("nan"), 0.003], []])
def test_a_peer_that_is_wrong_or_unchecked_is_not_faster(benchmark: Any, wrong: list[float]) -> None:
    times = {4096: {"ours": 10.0, "fla": 8.0, "flash_qla": 5.0}}
    errors = {"ours": [0.004], "fla": [0.003], "flash_qla": wrong}
    assert [row.faster for row in parsed(benchmark.table(rows(benchmark, times, errors)))] == [("fla",)]


def test_nothing_is_printed_where_no_peer_wins(benchmark: Any) -> None:
    errors = {"ours": [0.004], "fla": [0.003]}
    assert benchmark.table(rows(benchmark, {4096: {"ours": 1.0, "fla": 8.0}}, errors)) == []
    assert benchmark.table(rows(benchmark, {4096: {"fla": 8.0}}, errors)) == []
