"""Runs that are trained on several sets of rows together and tested on several ones, and runs that go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.report.sweeps import parse_sweep
from longrecall.sweep.examples import Cells, epoch_steps
from longrecall.sweep.grid import RunSpec, runs_of, steps_of
from longrecall.sweep.outcomes import Patience
from longrecall.sweep.recipe import SweepRecipe
from longrecall.sweep.scheduler import train_all
from longrecall.sweep.slots import Slots
from longrecall.sweep.summary import best_rows, cell_rows
from longrecall.sweep.training import ModelRun
from longrecall.tasks.sequences import sequence_batch

CPU = torch.device("cpu")
SETS = {
    "train": [{"length": 8, "pairs": 2, "rows": 9}, {"length": 12, "pairs": 3, "rows": 5}],
    "test": [{"length": 8, "pairs": 1}, {"length": 16, "pairs": 4, "rows": 7}],
}
MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def pooled(tiny: dict[str, Any]) -> dict[str, Any]:
    tiny["tasks"] = [{"name": "mqar", "settings": {"vocab_size": 16}, **SETS}]
    tiny["training"] |= {"batch_size": {8: 4, 12: 2}, "learning_rates": [0.01], "shuffle": False}
    return tiny


def trained(spec: RunSpec) -> ModelRun:
    run = ModelRun(spec, *Cells(CPU).of(spec), CPU)
    for _ in run.work():
        pass
    return run


def test_pooled_sets_are_trained_one_after_the_other(pooled: dict[str, Any]) -> None:
    """The same training written down directly; a set's batch is that of its length, 16 takes the last entry's."""
    pooled["training"] |= {"schedule": "constant"}
    spec = runs_of(SweepRecipe.from_dict(pooled))[0]
    assert [part.batch_size for part in (*spec.pool, *spec.tests)] == [4, 2, 4, 2]
    assert (spec.train, spec.test, steps_of(spec)) == (14, 17, 2 * (3 + 3))
    run = trained(spec)
    torch.manual_seed(spec.seed)
    model = RecurrentLM(spec.model.config(spec.create_task()))
    assert model.config.context_length == 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        for part in spec.pool:
            ids, labels = map(torch.from_numpy, sequence_batch(spec.task_of(part), "train", 0, part.rows))
            for start in range(0, part.rows, part.batch_size):
                rows = slice(start, start + part.batch_size)
                logits = model(ids[rows]).logits.flatten(0, 1)
                torch.nn.functional.cross_entropy(logits, labels[rows].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(run.predictor.model.parameters(), model.parameters(), strict=True):
        # Twelve steps in float32; AdamW divides by tiny second moments, which magnifies the order of sums.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=5e-5)
    for part, outcome in zip(spec.tests, run.outcomes, strict=True):
        ids, labels = map(torch.from_numpy, sequence_batch(spec.task_of(part), "test", 0, part.rows))
        right = (model(ids).logits.argmax(-1) == labels)[labels != -100]
        assert outcome.history[-1][2] == pytest.approx(right.double().mean().item(), abs=1e-12)
    mean = sum(outcome.history[-1][2] for outcome in run.outcomes) / 2
    assert run.history[-1][2] == pytest.approx(mean, abs=1e-12)


def test_every_test_set_is_a_cell(
    pooled: dict[str, Any], write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tasks=pooled["tasks"], training=pooled["training"])
    assert main(["sweep", str(recipe)]) == 0
    said = capsys.readouterr()
    lines, told = said.out.splitlines(), said.err.splitlines()
    assert [line.split(":")[0] for line in told] == ["1 of 2", "2 of 2"]
    assert "mqar gla 8 wide, rate 0.01, seed 0: accuracy 0." in told[0] and told[0].endswith("12 steps, done")
    assert lines[1].split() == ["length=8", "pairs=1", "length=16", "pairs=4"]
    found = json.loads(recipe.with_suffix(".json").read_text())
    assert found["runs"] == len(found["rows"]) == 2
    for row in found["rows"]:
        assert row["pool"][0] == {"vocab_size": 16, "length": 8, "pairs": 2, "rows": 9}
        assert [test["rows"] for test in row["tests"]] == [10, 7] and len(row["tests"][0]["history"]) == 2
        mean = sum(test["history"][-1][1] for test in row["tests"]) / 2
        assert row["history"][-1][2] == pytest.approx(mean, abs=1e-12)
    cells = cell_rows(found["rows"])
    assert [cell["settings"]["length"] for cell in cells] == [8, 16, 8, 16]
    assert cells[0]["settings"]["train"] == 14
    assert cells[0]["settings"]["pool"] == "length 8 pairs 2 rows 9, length 12 pairs 3 rows 5"
    assert len(best_rows(parse_sweep(found, "x.json", "x").rows, "accuracy")) == 4
    assert main(["sweep", str(recipe), "--dry-run"]) == 0
    assert "2 runs; dry run" in capsys.readouterr().out


def test_steps_of_several_sets_are_mixed_with_shuffle_alone() -> None:
    plain = epoch_steps([(5, 2), (3, 3)], False, 0, 0)
    assert [(index, rows.tolist()) for index, rows in plain] == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5]), (1, [0, 1, 2])]
    orders = {tuple(index for index, _ in epoch_steps([(40, 4), (40, 8)], True, 0, epoch)) for epoch in range(5)}
    assert len(orders) == 5 and all(sorted(order) == [0] * 10 + [1] * 5 for order in orders)


def test_a_run_stops_on_all_sets_and_when_its_loss_no_longer_falls(
    pooled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled["training"] |= {"epochs": 9, "stop_at": 0.9}
    values = iter([0.95, 0.2, 0.95, 0.91])
    names = ("accuracy", "whole_accuracy", "macro_accuracy", "mad_accuracy")
    monkeypatch.setattr("longrecall.sweep.training.scores", lambda *_: dict.fromkeys(names, next(values)))
    row = trained(runs_of(SweepRecipe.from_dict(pooled))[0]).row()
    assert (row["steps"], row["reached_at_step"], row["accuracy"]) == (12, 12, pytest.approx(0.93))
    assert [test["reached_at_step"] for test in row["tests"]] == [6, 12]
    monkeypatch.setattr("longrecall.sweep.training.scores", lambda *_: dict.fromkeys(names, 0.5))
    words = {"patience": 2, "improvement": 0.9, "stop_at": None, "learning_rates": [1e-9]}
    for reached, steps in ((0.4, 18), (0.6, 54)):
        pooled["training"] |= words | {"patience_from": reached}
        assert trained(runs_of(SweepRecipe.from_dict(pooled))[0]).row()["steps"] == steps


def test_patience_begins_when_something_was_learned() -> None:
    patience = Patience()
    # Two that do not count, a fall, then one, two.
    losses = [(4.0, False), (4.0, False), (4.0, False), (3.0, True), (2.99, True), (3.5, True)]
    assert [patience.spent(loss, reached, 2, 0.01) for loss, reached in losses] == [False] * 5 + [True]


def test_a_stopped_run_goes_on_where_it_was(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Between two steps of an epoch; dropout and the order of rows go on as well."""
    spec = make_spec("training.dropout=0.2", "training.epochs=4", "training.evaluate_every=2")
    whole, first = trained(spec), ModelRun(spec, *Cells(CPU).of(spec), CPU)
    for _ in zip(range(5), first.work(), strict=False):
        pass
    first.save(tmp_path / "x.pt")
    second = ModelRun(spec, *Cells(CPU).of(spec), CPU)
    second.load(tmp_path / "x.pt")
    assert second.step == 5
    for _ in second.work():
        pass
    assert second.row() == whole.row()
    for ours, theirs in zip(second.predictor.parameters(), whole.predictor.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_budget_leaves_checkpoints_that_resume_takes(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec("training.epochs=8", "training.evaluate_every=2")
    whole: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    assert train_all([spec], CPU, 1, None, whole.append)
    for _ in range(200):
        # A deadline that is over after some steps, in a different place of the run every time.
        deadline = time.time() + 0.03
        if train_all([spec], CPU, 1, deadline, rows.append, on_running=running.append, checkpoints=tmp_path):
            break
        assert rows or [path.name for path in tmp_path.iterdir()] == [f"{spec.key[:16]}.pt"]
    assert rows == whole and running and not list(tmp_path.iterdir())


def test_a_run_that_evaluates_after_every_step_is_stopped_too(make_spec: MakeSpec, tmp_path: Path) -> None:
    queue, rows = iter([make_spec("training.epochs=8", "training.evaluate_every=1")]), list[dict[str, Any]]()
    training = Slots(lambda: next(queue, None), CPU, 1, rows.append, checkpoints=tmp_path)
    for _ in range(3):
        training.turn()
    (stopped,) = training.running()
    assert stopped["steps"] == len(stopped["history"]) == 3 and not rows
    assert len(list(tmp_path.iterdir())) == 1
    training.close()


def test_a_disk_that_is_full_when_the_budget_ends(make_spec: MakeSpec, tmp_path: Path) -> None:
    """One line says so, and the other runs have their checkpoints."""
    specs = [make_spec("training.epochs=100000", f"training.learning_rates=[{rate}]") for rate in (0.01, 0.02)]
    # Where a checkpoint is written until it is whole, there is a folder.
    (tmp_path / f"{specs[0].key[:16]}.pt.partial").mkdir()
    slots = Slots(iter([*specs, None]).__next__, CPU, 2, lambda row: None, checkpoints=tmp_path)
    message = r"run\.checkpoints: cannot write .*\.pt: .*; make room or name another folder, and --resume"
    slots.turn()
    with pytest.raises(UserError, match=message):
        slots.running()
    slots.close()
    assert (tmp_path / f"{specs[1].key[:16]}.pt").exists()


def test_checkpoints_that_cannot_be_used(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    folder = recipe.parent / "stopped"
    folder.write_text("a file")
    words = ["sweep", str(recipe), "--set", f"run.checkpoints={folder}"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "run.checkpoints" in error and "name a folder" in error and error.count("\n") == 1
    assert not recipe.with_suffix(".json").exists()
    folder.unlink()
    # A damaged file fails its run alone, with --resume; from the start it is deleted.
    key = runs_of(SweepRecipe.load(recipe))[0].key[:16]
    folder.mkdir()
    (folder / f"{key}.pt").write_bytes(b"no checkpoint")
    assert main([*words, "--resume"]) == 0
    said = capsys.readouterr().out
    assert "1 of 4 runs failed" in said and "is not a checkpoint of a sweep" in said and "delete it" in said
    assert main([*words, "--force"]) == 0
    assert "failed" not in capsys.readouterr().out and not list(folder.iterdir())


def test_rows_of_before_are_still_those_of_the_same_runs(tiny: dict[str, Any], pooled: dict[str, Any]) -> None:
    """The key of a plain run, as it was before there were sets, norms and patience."""
    tiny["tasks"] = [{"name": "mqar", "settings": {"vocab_size": 16, "length": 8, "pairs": 2}}]
    tiny["training"] = {"epochs": 2, "learning_rates": [0.003, 0.01], "batch_size": 8}
    keys = [spec.key for spec in runs_of(SweepRecipe.from_dict(tiny))]
    assert keys[0] == KEY
    tiny["models"] |= {"norm": "layer"}
    assert runs_of(SweepRecipe.from_dict(tiny))[0].key != KEY


KEY = "ebe22ab57e23763286e16e899bf666d3a71c5f3122420f7a9998019a5d6629f5"


@pytest.mark.parametrize(
    ("norm", "second"), [("layer", True), ({"gla": "rms", "others": "layer"}, {"retnet": True, "gla": False})]
)
def test_blocks_of_the_benchmark(norm: Any, second: Any, tiny: dict[str, Any]) -> None:
    tiny["models"] |= {"norm": norm, "second_norm": second, "final_norm": "layer"}
    gla, _, retnet, _ = runs_of(SweepRecipe.from_dict(tiny))
    torch.manual_seed(0)
    model = RecurrentLM(retnet.model.config(retnet.create_task())).double()
    (layer,) = model.model.layers
    assert [type(module).__name__ for module in (layer.mixer_norm, layer.mlp_norm, model.model.norm)] == [
        "LayerNorm"
    ] * 3
    ids = torch.arange(8)[None]
    x = model.get_input_embeddings()(ids)
    mixed, _ = layer.mixer(
        torch.nn.functional.layer_norm(x, (8,)), None, mask=None, position=torch.zeros(1, dtype=torch.long)
    )
    y = x + mixed
    y = y + torch.nn.functional.layer_norm(y, (8,))
    expected = torch.nn.functional.layer_norm(y, (8,)) @ model.get_input_embeddings().weight.T
    # float64: the same sums in another order.
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-12)
    tiny["models"] |= {"mlp": {"gla": 16, "others": 0}, "norm": "layer", "second_norm": {"retnet": True, "gla": False}}
    assert {spec.model.mlp for spec in runs_of(SweepRecipe.from_dict(tiny))} == {16, 0}
    described = gla.model.description()
    assert described.get("norm", "rms") == ("layer" if norm == "layer" else "rms")
    assert trained(retnet).row()["parameters"] == sum(p.numel() for p in model.parameters())
