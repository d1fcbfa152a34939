"""Data parallelism with two real processes (gloo, CPU): one gradient, own shards, own states, exact resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import longrecall
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint
from longrecall.training.checkpoints import find_saved_runs
from longrecall.training.data import BatchStream
from longrecall.training.evaluation import Share, prepare_evaluation
from longrecall.training.initial_states import Zero, make_initial_state
from longrecall.training.optimizer import make_optimizer, parameter_groups, touched_names
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from longrecall.training.schedule import rate_factor
from longrecall.training.segments import Segments, read_batch
from tests import warm
from tests.processes import on_processes
from tests.training.interventions import override


class Killed(BaseException):
    """Ends a run as a signal would."""


def train_all(folders: list[str]) -> None:
    """What each of two processes does: every run whole, and killed and resumed."""
    original = BatchStream.__iter__

    def dying(self: BatchStream) -> Iterator[Any]:
        for index, batch in enumerate(original(self)):
            if index == 5:
                raise Killed
            yield batch

    for folder in folders:
        path = f"{folder}/r.yaml"
        run_recipe(Recipe.load(path, [f"run.output={folder}/whole"]), show_progress=False)
        BatchStream.__iter__ = dying
        with suppress(Killed):
            run_recipe(Recipe.load(path, [f"run.output={folder}/killed"]), show_progress=False)
        BatchStream.__iter__ = original
        summary = run_recipe(Recipe.load(path, [f"run.output={folder}/killed"]), resume=True, show_progress=False)
        assert summary.resumed_from == 2, summary
    # The first process alone looks at the folder; the other one must not wait for it in vain.
    with pytest.raises(UserError, match=r"holds a run already \(steps\)"):
        run_recipe(Recipe.load(path, [f"run.output={folder}/killed"]), show_progress=False)


def on_two_processes(*folders: str) -> None:
    """What torchrun does, which imports everything again for each process; to be run.

    tests/training/parallel/test_launch.py starts torchrun itself.
    """
    on_processes(2, partial(train_all, list(folders)))


KINDS: dict[str, dict[str, Any]] = {
    "state_passing": {"probability": 0.7},
    "fitted_noise": {"decay": 0.9},
    "truncated_bptt": {},
    "learned": {"freeze": True},
}
OWN = {
    "state_passing": "initial_state.carried.0.recurrent",
    "fitted_noise": "initial_state.mean.0.recurrent",
    "truncated_bptt": "initial_state.carried.0.recurrent",
    "learned": "initial_state.0/recurrent",
}
"""A tensor of each intervention as a checkpoint holds it."""


MEASURED = (
    "evaluation={every: 3, held_out: {sources: [{kind: text, path: PATH}], tokens: 240}, tasks: TASKS, best: true}"
)
"""Five held-out sequences in batches of three: a process has a whole batch, the other one two rows of its batch."""
TASKS = "[{kind: passkey, lengths: [160], samples: 3, options: {depths: [0.5]}}]"


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def evaluations(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{**row["evaluation"], "seconds": 0.0} for row in rows if "evaluation" in row]


def reference(recipe: Recipe) -> list[float]:
    """The same training in one process: the rows of both streams in one batch, one gradient over all labels."""
    source = open_checkpoint(recipe.model.checkpoint)
    model = longrecall.load(recipe.model.checkpoint, dtype="float32").train()
    initial = make_initial_state(recipe.initial_state, model, recipe.run.seed)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    rate = getattr(recipe.initial_state, "learning_rate", 0.0)
    groups = parameter_groups(names, touched_names(source.surgery), recipe.optimizer, rate)
    optimizer = make_optimizer(model, groups, recipe.optimizer)
    streams = [
        BatchStream(recipe.data, byte_tokenizer(), recipe.run.batch_size, rank, 2, continued=recipe.continues)
        for rank in range(2)
    ]
    found = []
    for step in range(recipe.steps(2)):
        total, labels = torch.zeros(()), 0
        for _ in range(recipe.run.gradient_accumulation):
            one, two = (stream.next_batch() for stream in streams)
            ids, targets, text = (torch.cat([one[key], two[key]]) for key in ("input_ids", "labels", "text"))
            segments = Segments.of(one["starts"] + two["starts"], 48) if recipe.continues else None
            count = int((targets[:, 1:] != -100).sum())
            total = total + read_batch(model, ids, targets, text, initial, segments) * count
            labels += count
        (total / labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        for group, mine in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = mine.learning_rate * rate_factor(step, recipe.steps(2), recipe.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / labels).item())
    return found


@pytest.mark.long
def test_two_processes(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Every intervention: the losses are those of one process that does the work of both, and a resume is exact."""
    short = ("run.steps=4", "run.save_every=2")
    measured = {
        kind: MEASURED.replace("PATH", str(tmp_path / "text.txt")).replace(
            "TASKS", "[]" if kind == "learned" else TASKS
        )
        for kind in KINDS
    }
    recipes = {kind: make_recipe(override(kind, **options), *short, measured[kind]) for kind, options in KINDS.items()}
    for kind, recipe in recipes.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "r.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    done = warm.run(on_two_processes, *(str(tmp_path / kind) for kind in recipes))
    assert done.returncode == 0, done.stderr[-3000:]

    for kind, recipe in recipes.items():
        whole = losses(tmp_path / kind / "whole")
        # float32 sums over two processes and micro-batches in another order, grown over four steps of AdamW.
        assert whole == pytest.approx(reference(recipe), rel=1e-4), kind
        assert losses(tmp_path / kind / "killed") == whole, kind
        assert evaluations(tmp_path / kind / "killed") == evaluations(tmp_path / kind / "whole"), kind
        if kind != "learned":
            found = prepare_evaluation(recipe, byte_tokenizer())
            assert found is not None
            model = longrecall.load(tmp_path / kind / "whole" / "final")
            alone = found.measure(model, Zero(), Share(0, 1, False, lambda tensor: tensor), nullcontext)
            # 1e-6: float32 sums of other batches.
            assert evaluations(tmp_path / kind / "whole")[-1] == pytest.approx({**alone, "seconds": 0.0}, rel=1e-6), (
                kind
            )
        names = ["best", "final", "log.jsonl", "steps", "training.json"]  # and no lock file
        assert [name for name in sorted(os.listdir(tmp_path / kind / "killed")) if name[:7] != "initial"] == names
        runs = find_saved_runs(tmp_path / kind / "whole")
        assert [saved.step for saved in runs] == [2, 4]
        first, second = runs[-1].process(0), runs[-1].process(1)
        assert first.data["position"] != second.data["position"]
        own = OWN.get(kind)
        if own is not None:
            assert first.tensors[own].shape == second.tensors[own].shape
            # What a process carries is its own; what all fit or learn is the same everywhere.
            assert torch.equal(first.tensors[own], second.tensors[own]) is (kind in ("learned", "fitted_noise"))
