"""Runs that end early: damaged checkpoints, NaN, full disks; and how they go on. `tests.test_kills` kills them."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints import Saver, drop_old, find_saved_runs, step_folder
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from tests.training.runs import Killed, equal, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]


def test_resume_between_log_lines_keeps_the_running_mean(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = ["run.save_every=4", "run.log_every=3"]
    expected = train(make_recipe(*overrides, f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe(*overrides)
    with monkeypatch.context() as patch:
        kill_after(patch, 10)
        with pytest.raises(Killed):
            train(recipe)
    assert train(recipe, resume=True) == expected


def test_half_written_and_damaged_checkpoints_are_passed_over(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = ["run.save_every=2", "run.keep=5"]
    expected = train(make_recipe(*overrides, f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe(*overrides)
    output = Path(recipe.run.output)
    with monkeypatch.context() as patch:
        kill_after(patch, 9)
        with pytest.raises(Killed):
            train(recipe)
    assert [saved.step for saved in find_saved_runs(output)] == [2, 4]
    damaged = step_folder(output, 4) / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shutil.copytree(step_folder(output, 2), output / "steps" / ".step-00000006.partial")
    (step_folder(output, 5)).mkdir()
    for name in ("..step-00000049.partial.partial-01234567", ".step-00000003.partial"):
        (output / "steps" / name).mkdir()
    (output / ".final.partial-01234567").mkdir()
    (output / ".training.json.0123456789abcdef.tmp").touch()
    assert [saved.step for saved in find_saved_runs(output)] == [2]
    assert train(recipe, resume=True) == expected
    # What a kill left is gone, and what `keep` counts is whole.
    assert sorted(path.name for path in (output / "steps").iterdir()) == [f"step-0000000{step}" for step in (2, 4, 6)]
    assert sorted(path.name for path in output.iterdir()) == ["final", "log.jsonl", "steps", "training.json"]
    assert equal(weights(output / "final"), weights(tmp_path / "whole" / "final"))


def test_resume_of_a_finished_run_trains_nothing(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    rows = train(recipe)
    before = weights(Path(recipe.run.output) / "final")
    assert run_recipe(recipe, resume=True, show_progress=False).resumed_from == 6
    assert equal(weights(Path(recipe.run.output) / "final"), before)
    assert len(rows) == 6


def test_resume_refuses_another_recipe(make_recipe: MakeRecipe) -> None:
    train(make_recipe("run.steps=2"))
    with pytest.raises(UserError, match=r"optimizer\.learning_rate was 0\.01 and is now 0\.02"):
        run_recipe(make_recipe("run.steps=2", "optimizer.learning_rate=0.02"), resume=True)
    with pytest.raises(UserError, match="holds a run already"):
        run_recipe(make_recipe("run.steps=2"))


def test_old_checkpoints_are_dropped(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("run.save_every=1", "run.keep=2")
    train(recipe)
    assert [saved.step for saved in find_saved_runs(Path(recipe.run.output))] == [5, 6]


def test_half_written_checkpoints_go_when_the_run_goes_on_and_not_only_at_its_end(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("run.save_every=2", "run.keep=2")
    remains = Path(recipe.run.output) / "steps" / "..step-00000049.partial.partial-01234567"
    remains.mkdir(parents=True)
    kill_after(monkeypatch, 0)
    with pytest.raises(Killed):
        train(recipe, resume=True)
    assert not remains.exists()


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_dropped(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("run.save_every=2", "run.keep=3")
    train(recipe)
    output, read = Path(recipe.run.output), Path.read_text

    def failing(self: Path, *arguments: Any, **options: Any) -> str:
        if self.parent == step_folder(output, 4):
            raise OSError(5, "Input/output error")
        return read(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing)
        drop_old(output, 2)
    assert [saved.step for saved in find_saved_runs(output)] == [2, 4, 6]
    drop_old(output, 2)
    assert [saved.step for saved in find_saved_runs(output)] == [4, 6]


def test_force_begins_anew_once_all_is_checked(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("run.steps=2")
    output = Path(recipe.run.output)
    train(make_recipe("run.steps=2", "run.save_every=1", "optimizer.learning_rate=0.5"))
    (output / "notes.txt").write_text("mine")
    before = sorted(output.rglob("*"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="start over with --force"):
        train(recipe)
    with pytest.raises(UserError, match="give one of them"):
        train(recipe, force=True, resume=True)
    with pytest.raises(UserError, match="holds the checkpoint that is trained, which --force would remove"):
        train(make_recipe("run.steps=2", f"model.checkpoint={output / 'final'}"), force=True)
    with pytest.raises(UserError, match=r"empty\.txt"):
        train(make_recipe("run.steps=2", f"data.sources.0.path={tmp_path / 'empty.txt'}"), force=True)
    assert sorted(output.rglob("*")) == before
    rows = train(recipe, force=True)
    assert rows == train(make_recipe("run.steps=2", f"run.output={tmp_path / 'other'}"))
    assert [saved.step for saved in find_saved_runs(output)] == [2]
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_loss_stops_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The message names the step, the data and the last good checkpoint, which is there and finite."""
    recipe = make_recipe("run.save_every=2")
    original = RecurrentLM.forward
    calls = iter(range(100))

    def poisoned(self: RecurrentLM, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if next(calls) == 7:  # two micro-batches a step: the fourth step
            out.loss = out.loss * value
        return out

    monkeypatch.setattr(RecurrentLM, "forward", poisoned)
    message = rf"the loss is {value} in step 4 \(data: sequences 21-23 of process 0: .*\)"
    with pytest.raises(UserError, match=message) as caught:
        train(recipe)
    good = step_folder(Path(recipe.run.output), 2)
    assert f"last good checkpoint: {good};" in str(caught.value) and "\n" not in str(caught.value)
    assert [saved.folder for saved in find_saved_runs(Path(recipe.run.output))] == [good]
    assert all(bool(tensor.isfinite().all()) for tensor in weights(good).values())


def test_nan_gradient_stops_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe()
    original = RecurrentLM.forward

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * float("nan")

    def poisoned(self: RecurrentLM, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.loss = Poison.apply(out.loss)
        return out

    monkeypatch.setattr(RecurrentLM, "forward", poisoned)
    with pytest.raises(UserError, match=r"the gradient norm is nan in step 1 .* last good checkpoint: none yet"):
        train(recipe)


def test_no_space_left_while_saving(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands in for a full disk: the system itself refuses the write."""
    recipe = make_recipe("run.save_every=2")
    original = Saver._copy
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(self: Saver, step: int, *arguments: Any) -> Any:
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        return original(self, step, *arguments)

    monkeypatch.setattr(Saver, "_copy", filling)
    try:
        with pytest.raises(UserError, match=r"cannot save step 4: .*; last good checkpoint: .*step-00000002") as caught:
            train(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    output = Path(recipe.run.output)
    assert [path.name for path in (output / "steps").iterdir()] == ["step-00000002"]
    assert [saved.step for saved in find_saved_runs(output)] == [2]
    monkeypatch.undo()
    assert len(train(recipe, resume=True)) == 6


def test_output_that_cannot_be_written(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write .*out: .*; choose another run\.output"):
        run_recipe(make_recipe(f"run.output={tmp_path / 'file' / 'out'}"))
