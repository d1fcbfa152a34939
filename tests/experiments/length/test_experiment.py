"""experiments/length/experiment.py: steps and bases in limited time, its batches, its weights as a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.common.engine import Plan, rate_factor
from experiments.length import experiment, package_variants
from experiments.length import tasks as length_tasks


class Clock:
    """An experiment without data whose clock goes on by `pace` seconds a step."""

    def __init__(self, pace: float, **options: Any) -> None:
        self.now, self.pace = 0.0, pace
        self.calls: list[tuple[int, int]] = []
        self.experiment = object.__new__(experiment.Experiment)
        self.experiment.args = argparse.Namespace(**options)
        self.experiment.record = {"results": [], "variants": {}}
        self.experiment.seed_seconds = 0.0
        self.experiment.clock = lambda: self.now
        self.experiment.say = lambda text: None

    def forward(self, first: int, end: int) -> None:
        self.calls.append((first, end))
        self.now += self.pace * (end - first)


@pytest.mark.parametrize("pace", [0.001, 0.01, 0.03])
def test_steps_fit_the_time(pace: float) -> None:
    clock = Clock(pace, hold=0.5)
    plan = Plan("model", 1e-3, warmup=10, hold=0.5)
    runs = [SimpleNamespace(steps=8000, plan=plan) for _ in range(2)]
    done = clock.experiment.plateau(runs, clock.forward, until=100.0)
    clock.forward(done, runs[0].steps)
    assert [b for _, b in clock.calls[:-1]] == [a for a, _ in clock.calls[1:]]
    assert runs[0].steps == runs[1].steps == clock.calls[-1][1]
    # Both halves may be over by one call of 50 steps.
    assert clock.now <= 100.0 + 100 * pace
    assert runs[0].steps == 8000 or clock.now >= 100.0
    assert [rate_factor(step, runs[0].steps, plan) for step in (10, done - 1, done)] == [1.0, 1.0, 1.0]
    assert rate_factor(runs[0].steps - 1, runs[0].steps, plan) < 1e-4


def variants(rises: dict[str, float | None]) -> dict[str, Any]:
    return {name: {"perplexity": [{"rise": value}]} for name, value in rises.items()}


def test_the_illest_go_on() -> None:
    rises = {"gla_k16:0": 0.02, "slow_gla_k16:0": 0.3, "slow_gla_k16:1": None, "gla_k16:1": 0.03}
    clock = Clock(0.0, bases=None)
    clock.experiment.record["variants"] = variants(rises)
    # A loss that is not finite has no rise: nothing is more ill.
    assert clock.experiment.bases() == {"slow": "slow_gla_k16:1", "gla": "gla_k16:1"}
    clock.experiment.args.bases = 3
    assert list(clock.experiment.bases().values()) == ["slow_gla_k16:1", "slow_gla_k16:0", "gla_k16:1"]


def test_no_base_begins_that_would_not_end() -> None:
    clock = Clock(0.0, seconds=100.0, seeds=3)
    trained: list[tuple[str, int]] = []

    def one_seed(name: str, seed: int, continued: bool) -> None:
        clock.now += 7.0
        if not continued:
            trained.append((name, seed))
        clock.experiment.record["results"].append({})

    clock.experiment.post_train_seed = one_seed
    clock.now = 40.0
    for name in ("first", "second"):
        clock.experiment.post_train(name)
    # 14 seconds a seed: from 82 on three more would end at 124.
    assert trained == [("first", 0), ("first", 1), ("first", 2)]


def test_stories_do_not_depend_on_what_the_encoder_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from longrecall.tasks.encoding import ByteEncoder, PieceEncoder

    tasks = length_tasks.Tasks(0, 100, (10, 14, 4, 2, 2), 0.4, 8)
    shared = [tasks.batch(step) for step in (3, 50)]
    monkeypatch.setattr(length_tasks, "BYTES", PieceEncoder(ByteEncoder()))
    fresh = [tasks.batch(step) for step in (50, 3)][::-1]
    for ours, theirs in zip(shared, fresh, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_weights_become_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from longrecall.models.loading import load

    model = experiment.fresh("slow_gla_k16:3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    weights = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(weights, tmp_path / "slow_gla_k16-3.safetensors")
    packed = load(str(package_variants.package(tmp_path, "slow_gla_k16:3")))
    ids = torch.arange(40)[None]
    # The same weights, the same code.
    assert torch.equal(packed(ids).logits, model.eval()(ids).logits)
    save_file({n: t for n, t in weights.items() if "gk_proj" not in n}, tmp_path / "slow_gla_k16-3.safetensors")
    with pytest.raises(SystemExit, match="gk_proj"):
        package_variants.package(tmp_path, "slow_gla_k16:3")
