"""Training from nothing: rows that are cut into shorter ones, and steps that fit into the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.common import from_scratch
from experiments.common.engine import Plan, train
from experiments.common.from_scratch import FreshRun
from experiments.common.models import build


def test_a_step_over_cut_rows_is_a_step_over_shorter_rows() -> None:

    mixer = {"type": "gla", "num_heads": 1, "key_dim": 4, "value_dim": 4}
    description = {"hidden_size": 8, "layers": [{"mixer": mixer, "mlp_size": 8}]}
    ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    trained = []
    for shape, cuts in (((2, 24), (3,)), ((6, 8), ())):
        buffers = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        run = FreshRun(build(description, 24, 1, "cpu"), Plan("a", 1e-2, warmup=1), 10, *buffers, cuts)
        run.pieces = 3 if cuts else 1
        train([run], 2, lambda step, shape=shape: (ids.view(shape), ids.view(shape)), *buffers)
        trained.append(torch.cat([p.flatten() for p in run.model.parameters()]))
    start = torch.cat([p.flatten() for p in build(description, 24, 1, "cpu").parameters()])
    # The same operations in the same order.
    assert (trained[0] == trained[1]).all() and (trained[0] != start).any()


def test_training_ends_with_its_budget_and_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

    class Timed:
        steps, ids, labels = 0, torch.zeros(1), torch.zeros(1)

    run = Timed()

    def train(runs: Any, stop: int, *rest: Any, first: int = 0) -> None:
        Clock.now += 0.1 * (stop - first)

    monkeypatch.setattr(from_scratch, "train", train)
    monkeypatch.setattr(from_scratch.time, "time", lambda: Clock.now)
    batches = lambda step: (run.ids, run.labels)  # noqa: E731
    found = from_scratch.budgeted([run], 1000, 20.0, batches)
    # 90 steps tell that 200 take 20 seconds, give or take a rounding.
    assert found["steps"] == run.steps and 199 <= found["steps"] <= 200
    assert from_scratch.budgeted([run], 40, 20.0, batches)["steps"] == run.steps == 40
    assert from_scratch.budgeted([run], 120, 1e9, batches)["steps"] == run.steps == 120


def test_a_budget_notices_that_others_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    run = SimpleNamespace(steps=0, ids=torch.zeros(1), labels=torch.zeros(1))

    def train(runs: Any, stop: int, *rest: Any, first: int = 0) -> None:
        # Another program comes after 60 seconds: a step takes three times as long.
        now[0] += (0.1 if now[0] < 60 else 0.3) * (stop - first)

    monkeypatch.setattr(from_scratch, "train", train)
    monkeypatch.setattr(from_scratch.time, "time", lambda: now[0])
    found = from_scratch.budgeted([run], 10_000, 180.0, lambda step: (run.ids, run.labels))
    # 600 fast steps and 400 slow ones; a step too many or too few from the rounding of each estimate.
    assert now[0] == pytest.approx(180.0, abs=1.0) and found["steps"] == run.steps
    assert 980 <= found["steps"] <= 1020
    assert found["plans"][0] == [90, pytest.approx(1800, abs=1)] and found["plans"][-1][1] == found["steps"]
