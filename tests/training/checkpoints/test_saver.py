"""The thread that writes checkpoints: training goes on beside it, one checkpoint at a time, and its errors come out."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints import SavedRun, find_saved_runs, restore_optimizer, step_folder
from longrecall.training.checkpoints.saved_run import OPTIMIZER_FILE
from longrecall.training.checkpoints.saver import Saver, optimizer_state
from longrecall.training.optimizer import make_optimizer, parameter_groups
from longrecall.training.recipe import OptimizerRecipe, Recipe
from longrecall.training.trainer import RecurrentTrainer
from tests.training.runs import equal, train, weights

MakeRecipe = Callable[..., Recipe]


def before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], object]) -> None:
    original = getattr(owner, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        action()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, changed)


def test_training_goes_on_while_a_checkpoint_is_written(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk is as slow as the next step: what is written is what the weights were when the save began."""
    expected = train(make_recipe("run.save_every=2", f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe("run.save_every=2")
    writing, stepped = threading.Semaphore(0), threading.Semaphore(0)
    waited: list[bool] = []
    micro_batches = iter(range(100))

    def step() -> None:
        # Steps 3 and 5, two micro-batches each: begun while the step before is being saved.
        if next(micro_batches) in (5, 9):
            assert writing.acquire(timeout=60)
            stepped.release()

    def write() -> None:
        writing.release()
        if len(waited) < 2:
            waited.append(stepped.acquire(timeout=60))

    before(monkeypatch, RecurrentTrainer, "training_step", step)
    before(monkeypatch, Saver, "_describe", write)
    assert train(recipe) == expected
    assert waited == [True, True]
    output = Path(recipe.run.output)
    for step_number in (2, 4, 6):
        found, wanted = (step_folder(place, step_number) for place in (output, tmp_path / "whole"))
        if wanted.exists():
            assert equal(weights(found), weights(wanted))


def test_what_the_disk_says_comes_out_at_the_next_log_line(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("run.save_every=2", "run.steps=40")
    failed = threading.Event()

    def refuse(*_: Any) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Saver, "_describe", refuse)
    steps = iter(range(1000))
    before(monkeypatch, RecurrentTrainer, "training_step", lambda: next(steps) > 4 and failed.wait(60))
    with pytest.raises(UserError, match=r"^cannot save step 2: No space left on device; last good .*: none yet$"):
        train(recipe)
    assert next(steps) < 12
    assert list((Path(recipe.run.output)).glob("steps/*")) == []


def test_ctrl_c_while_a_save_waits_for_the_one_before(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written is written, and the run ends then."""
    # A shell that starts the tests in the background has them ignore Ctrl-C.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    recipe, asked = make_recipe("run.save_every=2"), threading.Event()
    ident, saves = threading.get_ident(), iter(range(100))

    def interrupt() -> None:
        assert asked.wait(60)
        while (
            frame := sys._current_frames()[ident].f_code
        ).co_filename != threading.__file__ or frame.co_name != "wait":
            time.sleep(0.001)
        signal.pthread_kill(ident, signal.SIGINT)

    before(monkeypatch, Saver, "_describe", interrupt)
    before(monkeypatch, Saver, "wait", lambda: next(saves) == 1 and asked.set())
    try:
        with pytest.raises(KeyboardInterrupt):
            train(recipe)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert [saved.step for saved in find_saved_runs(Path(recipe.run.output))] == [2]


@pytest.mark.timeout(120)
def test_a_system_without_threads_left_ends_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "saver":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        train(make_recipe("run.save_every=2"))


def test_optimizer_state_round_trip_continues_exactly(make_model: Callable[..., RecurrentLM], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    settings = OptimizerRecipe(learning_rate=0.01, touched="10x", weight_decay=0.3)

    def step(model: RecurrentLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
        ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(seed))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one, other = make_model(seed=1), make_model(seed=2)
    groups = parameter_groups([name for name, _ in one.named_parameters()], frozenset(), settings)
    first, second = make_optimizer(one, groups, settings), make_optimizer(other, groups, settings)
    for seed in range(3):
        step(one, first, seed)
    other.load_state_dict(one.state_dict())
    save_file(optimizer_state(one, first), tmp_path / OPTIMIZER_FILE)
    restore_optimizer(other, second, SavedRun(tmp_path, {"files": {}}).optimizer)
    step(one, first, 9)
    step(other, second, 9)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_recipe_of_an_older_version_is_filled_up(make_recipe: MakeRecipe) -> None:
    """Keys that it did not know have their defaults; the parallel section may change."""
    recipe = make_recipe("run.steps=2")
    train(recipe)
    (saved,) = find_saved_runs(Path(recipe.run.output))
    old = {key: value for key, value in saved.state["recipe"].items() if key != "parallel"}
    del old["data"]["workers"]
    older = SavedRun(saved.folder, {**saved.state, "recipe": old})
    assert older.fit(recipe, 1) == recipe
    shared = older.fit(recipe, 3)
    assert shared.run.batch_size == 1
    assert older.fit(shared, 3) == shared
    with pytest.raises(UserError, match=r"3 rows in .*, which 2 processes cannot share equally; .* divides 3"):
        older.fit(recipe, 2)
    with pytest.raises(UserError, match=r"run\.batch_size was 3 and is now 2"):
        older.fit(make_recipe("run.steps=2", "run.batch_size=2"), 1)
