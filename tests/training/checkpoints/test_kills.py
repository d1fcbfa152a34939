"""Processes that are killed or whose disk is full: no other hangs, nothing is lost, and any number of them goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from longrecall.training.checkpoints import find_saved_runs
from tests import warm
from tests.processes import PATIENCE
from tests.training.checkpoints import processes
from tests.training.runs import equal, weights

SHARDS, COPIES = ["parallel.shard=2"], ["parallel.shard=1"]


def write_recipe(folder: Path, base: Path, text: Path, **sections: Any) -> None:
    folder.mkdir()
    recipe = {
        "model": {"checkpoint": str(base)},
        "data": {"context_length": 32, "sources": [{"kind": "text", "path": str(text)}]},
        # Rates at which rounding does not grow: AdamW divides a gradient that is rounding alone by itself.
        "optimizer": {"learning_rate": 1e-3, "warmup": 2, "epsilon": 1e-6},
        "initial_state": {"kind": "state_passing", "probability": 0.7},
        "run": {
            "output": "out", "steps": 4, "save_every": 2, "batch_size": 2, "log_every": 1, "report_to": "none",
        } | sections.pop("run", {}),
    } | sections  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))


def train(folder: Path, output: str, world: int, *overrides: str, resume: bool = False, **trouble: Any) -> Any:
    """A run of the plan; `trouble`: where a process dies, or another key of `processes.py`."""
    words = ["r.yaml", *(["--resume"] if resume else []), "--set", f"run.output={output}"]
    words += [word for override in overrides for word in ("--set", override)]
    return {"folder": str(folder), "output": output, "world": world, "words": words, **trouble}


def carry_out(folder: Path, runs: list[Any], timeout: float = PATIENCE) -> list[Any]:
    """Return how each run of a plan ended."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(runs))
    done = warm.run(processes.main, str(plan), timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    ends: list[Any] = json.loads(plan.with_suffix(".ends").read_text())
    return ends


def rows(output: Path) -> list[Any]:
    """The log, without the speed of the machine."""
    found = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key not in ("tokens_per_second", "data_wait")} for row in found]


def same(one: Path, other: Path) -> bool:
    """Bit for bit."""
    return rows(one) == rows(other) and equal(weights(one / "final"), weights(other / "final"))


def assert_close(one: Path, other: Path) -> None:
    """Up to the order of float sums: 1e-5 of a loss, and of the largest number of a tensor."""
    losses = [[row["loss"] for row in rows(place)] for place in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    found, wanted = weights(one / "final"), weights(other / "final")
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name


@pytest.mark.long
def test_a_process_that_dies_or_cannot_write_loses_nothing(base: Path, text: Path, tmp_path: Path) -> None:
    """Of two processes one is killed while it saves, or its disk is full; two or one go on, whole or sharded."""
    place = tmp_path / "runs"
    write_recipe(place, base, text)
    whole, *ends = carry_out(
        tmp_path,
        [
            train(place, "whole", 2, *SHARDS),
            train(place, "shard", 2, *SHARDS, trouble={"1": ("shard", 2)}),
            train(place, "shard", 2, *SHARDS, resume=True),
            train(place, "publish", 2, *COPIES, trouble={"0": ("publish", 2)}),
            train(place, "publish", 2, *SHARDS, resume=True),
            train(place, "full", 2, *SHARDS, trouble={"1": ("full", 2)}),
            train(place, "full", 3, *COPIES, resume=True),
            train(place, "full", 1, *COPIES, resume=True),
            train(place, "loading", 2, *SHARDS, trouble={"1": ("load", 1)}),
        ],
    )
    assert whole["codes"] == [0, 0], whole["said"]
    shard, shard_again, publish, publish_again, full, three, full_again, loading = ends
    for end in (shard_again, publish_again, full_again):
        assert set(end["codes"]) == {0}, end["said"]
    assert shard["codes"][1] == -9 and shard["codes"][0] not in (0, -9, -99)
    assert publish["codes"][0] == -9 and publish["codes"][1] not in (0, -9, -99)
    # One that dies before training begins, as when its memory runs out.
    assert loading["codes"] == [2, -9]
    lost = "another process of this run has ended; its own message says why. --resume continues from"
    for said in (shard["said"][0], publish["said"][1], loading["said"][0]):
        assert f"{lost} the last complete checkpoint" in said and "bug" not in said
    # The others end when a process has died, and do not wait for it.
    assert max(shard["seconds"], publish["seconds"]) < 100
    assert full["codes"] == [2, 2], full["said"]
    line = "cannot save step 4: process 1: File too large (os error 27); last good checkpoint: full/steps/step-00000002"
    assert full["said"][0].endswith(f"{line}\n") and full["said"][0].count("error:") == 1 and full["said"][1] == ""
    assert three["codes"] == [2, 2, 2]
    assert "saved with 4 rows in a batch of all processes, which 3 processes cannot share" in three["said"][0]
    assert same(place / "shard", place / "whole")
    for name in ("publish", "full"):
        assert_close(place / name, place / "whole")
        assert [path.name for path in sorted((place / name / "steps").iterdir())] == ["step-00000002", "step-00000004"]
    assert [run.sharded for run in find_saved_runs(place / "publish")] == [False, True]
    assert [run.world for run in find_saved_runs(place / "full")] == [2, 1]


@pytest.mark.slow
def test_a_process_that_is_interrupted_or_has_no_memory_ends_all(base: Path, text: Path, tmp_path: Path) -> None:
    """One or all; what was saved before is whole, and nothing half-written stays."""
    place = tmp_path / "runs"
    write_recipe(place, base, text)
    cases: dict[str, tuple[list[str], dict[str, Any], list[int]]] = {
        "second": (SHARDS, {"1": ("interrupt", 3)}, [2, 130]),
        "first": (COPIES, {"0": ("interrupt", 3)}, [130, 2]),
        "both": (SHARDS, {"0": ("interrupt", 3), "1": ("interrupt", 3)}, [130, 130]),
        "memory": (SHARDS, {"1": ("memory", 3)}, [2, 2]),
    }
    plan = [train(place, name, 2, *words, trouble=trouble) for name, (words, trouble, _) in cases.items()]
    for (name, (_, _, codes)), end in zip(cases.items(), carry_out(tmp_path, plan), strict=True):
        assert end["codes"] == codes, (name, end["said"])
        assert [saved.step for saved in find_saved_runs(place / name)] == [2], name
        assert not list((place / name).rglob(".*")), name


@pytest.mark.slow
def test_a_best_checkpoint_that_cannot_be_written_ends_all(base: Path, text: Path, tmp_path: Path) -> None:
    """The disk of one process is full, or the one that puts the shards together is killed: the one before stays."""
    place = tmp_path / "runs"
    held_out = {"sources": [{"kind": "text", "path": str(text)}], "tokens": 64}
    write_recipe(place, base, text, evaluation={"every": 1, "held_out": held_out, "best": True})
    whole, full, killed, again = carry_out(
        tmp_path,
        [
            train(place, "whole", 2, *SHARDS),
            train(place, "full", 2, *SHARDS, trouble={"1": ("best", 3)}),
            train(place, "killed", 2, *SHARDS, trouble={"0": ("kill best", 3)}),
            train(place, "killed", 2, *SHARDS, resume=True),
        ],
    )
    assert whole["codes"] == again["codes"] == [0, 0], (whole["said"], again["said"])
    assert full["codes"] == [2, 2], full["said"]
    line = "cannot save the best checkpoint: process 1: File too large (os error 27); last good checkpoint: "
    assert line in full["said"][0] and full["said"][0].count("error:") == 1 and full["said"][1] == ""
    assert weights(place / "full" / "best").keys() == weights(place / "whole" / "best").keys()
    assert killed["codes"][0] == -9 and killed["codes"][1] not in (0, -9, -99)
    assert equal(weights(place / "killed" / "best"), weights(place / "whole" / "best"))
    for name in ("full", "killed"):
        assert not list((place / name).glob(".*")), name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["state_passing", "truncated_bptt", "fitted_noise", "learned"])
def test_any_process_killed_at_any_moment(base: Path, text: Path, tmp_path: Path, world: int, kind: str) -> None:
    """Ten kills at random times of training, saves included: as many processes end bit for bit like those unkilled."""
    random = np.random.Generator(np.random.PCG64([world, *kind.encode()]))
    options = {"freeze": False} if kind == "learned" else {}
    place, kills = tmp_path / "runs", 5
    batch = {"batch_size": 4 // world, "steps": 20, "save_every": 1, "keep": 3}
    write_recipe(place, base, text, initial_state={"kind": kind, **options}, run=batch)
    (whole,) = carry_out(tmp_path, [train(place, "whole", world, *SHARDS)])
    assert set(whole["codes"]) == {0}, whole["said"]
    for name, worlds in (("same", [world]), ("other", [1, 2, 4])):
        plan = []
        for number, count in enumerate((*random.choice(worlds, kills).tolist(), worlds[0])):
            # Some time after a line of the log: in the middle of a step, of copying or of writing. Before the first
            # one they may yet look for each other, and the launcher, which is not here, ends those who look in vain.
            row = 2 * number + 1 + int(random.integers(2))
            kill = {"rank": int(random.integers(count)), "row": row, "seconds": float(random.uniform(0, 0.3))}
            # One that was killed before its first step was saved begins anew, and then as many rows as the others have.
            words = ["parallel.shard=1" if count == 1 else "parallel.shard=2", f"run.batch_size={4 // count}"]
            plan.append(train(place, name, count, *words, resume=True, kill=kill))
        del plan[-1]["kill"]
        ends = carry_out(tmp_path, plan, timeout=1200)
        assert all(-99 not in end["codes"] for end in ends), ends
        assert set(ends[-1]["codes"]) == {0}, ends[-1]["said"]
        killed = [
            planned["kill"] | end["moment"] for planned, end in zip(plan, ends, strict=True) if -9 in end["codes"]
        ]
        assert len(killed) >= 3
        print(name, json.dumps(killed))  # the moments, for who asks with -s
    assert same(place / "same", place / "whole")
    assert_close(place / "other", place / "whole")
