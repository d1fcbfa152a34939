from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.sweep import scheduler, training
from longrecall.sweep.examples import Cells, draw_examples
from longrecall.sweep.grid import RunSpec, sizes
from longrecall.sweep.scheduler import train_all
from longrecall.sweep.training import ModelRun, thinned
from longrecall.tasks.sequences import sequence_batch

CPU = torch.device("cpu")
MakeSpec = Callable[..., RunSpec]


def trained(spec: RunSpec) -> ModelRun:
    run = ModelRun(spec, *Cells(CPU).of(spec), CPU)
    for _ in run.work():
        pass
    return run


def test_a_run_is_plain_adamw_on_the_labels(make_spec: MakeSpec) -> None:
    """The same training written down directly: batches in order, the last one smaller, the loss over whole logits."""
    spec = make_spec("training.shuffle=false", "training.schedule_unit=epoch", "training.clip=0.5")
    run = trained(spec)
    torch.manual_seed(spec.seed)
    model = RecurrentLM(spec.model.config(spec.create_task()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, weight_decay=0.1)
    ids, labels = map(torch.from_numpy, sequence_batch(spec.create_task(), "train", spec.data_seed, spec.train))
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / 2))
        for start in range(0, 21, 8):
            logits = model(ids[start : start + 8]).logits.flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, labels[start : start + 8].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert run.step == 6 and run.status == "done"
    for (name, ours), theirs in zip(run.predictor.model.named_parameters(), model.parameters(), strict=True):
        # Six steps in float32; AdamW divides by tiny second moments, which magnifies the order of sums.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    test_ids, test_labels = map(torch.from_numpy, sequence_batch(spec.create_task(), "test", 0, spec.test))
    right = (model(test_ids).logits.argmax(-1) == test_labels)[test_labels != -100]
    assert run.history[-1][2] == pytest.approx(right.double().mean().item(), abs=1e-12)


def test_the_same_run_twice_gives_the_same_row(make_spec: MakeSpec) -> None:
    spec = make_spec("training.dropout=0.2", "models.mlp=width")
    torch.manual_seed(5)
    first = trained(spec).row()
    torch.manual_seed(6)
    assert trained(spec).row() == first
    json.dumps(first, allow_nan=False)
    assert first["status"] == "done" and first["seconds"] is None and first["epochs"] == 2
    assert trained(make_spec("training.dropout=0.2", "models.mlp=width", "training.seeds=[1]")).row() != first


@pytest.mark.parametrize("task", ["mad_compression", "mad_in_context_recall"])
def test_parameters_in_the_row_are_those_that_are_trained(make_spec: MakeSpec, task: str) -> None:
    words = (f"tasks.0.name={task}", "tasks.0.settings={vocab_size: 16, length: 8}", "models.tie_embeddings=false")
    spec = make_spec(*words, "models.mlp=8", "training.epochs=1", "training.decayed=matrices")
    run = trained(spec)
    assert sizes(spec)[0] == sum(p.numel() for p in run.predictor.parameters()) == run.row()["parameters"]
    assert math.isfinite(run.history[-1][1] or math.nan)


def test_a_run_stops_when_it_is_good_enough(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.5, 0.95, 0.9, 0.99])

    def scored(*_: Any) -> dict[str, float]:
        value = next(accuracies)
        return {"accuracy": value, "whole_accuracy": value / 2, "macro_accuracy": value / 4}

    monkeypatch.setattr(training, "scores", scored)
    row = trained(make_spec("training.epochs=9", "training.evaluate_every=2", "training.stop_at=0.93")).row()
    assert (row["steps"], row["reached_at_step"], row["accuracy"], row["whole_accuracy"]) == (4, 4, 0.95, 0.475)
    accuracies = iter([0.5, 0.95, 0.9, 0.93, 0.2])
    row = trained(make_spec("training.epochs=3", "training.evaluate_every=2")).row()
    # Nine steps: evaluated after 2, 4, 6, 8 and the last.
    assert [entry[0] for entry in row["history"]] == [2, 4, 6, 8, 9]
    assert (row["best_step"], row["accuracy"], row["reached_at_step"]) == (4, 0.95, None)


def test_a_diverged_run_says_so(make_spec: MakeSpec) -> None:
    spec = make_spec("training.learning_rates=[1e30]", "training.schedule=constant", "training.epochs=5")
    row = trained(spec).row()
    assert row["status"] == "diverged" and row["steps"] < 15
    assert row["history"][-1][1] is None
    json.dumps(row, allow_nan=False)


def test_a_failing_run_does_not_stop_the_others(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [make_spec(), make_spec("training.seeds=[1]"), make_spec("training.seeds=[2]")]
    take = ModelRun._take

    def failing(self: ModelRun, *arguments: Any) -> None:
        if self.spec.seed == 1:
            raise RuntimeError("two\nlines")
        take(self, *arguments)

    monkeypatch.setattr(ModelRun, "_take", failing)
    rows: list[dict[str, Any]] = []
    assert train_all(specs, CPU, 1, None, rows.append)
    assert [row["status"] for row in rows] == ["done", "failed", "done"]
    assert rows[1]["reason"] == "two lines" and rows[1]["accuracy"] is None and rows[1]["parameters"] > 0


def test_a_full_gpu_waits_for_room(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two runs: the third starts when one has ended; a run that does not even fit alone is a failure."""
    alive: list[int] = []
    most = 2
    attempts: list[int] = []

    class Fake:
        def __init__(self, spec: RunSpec, *_: Any) -> None:
            attempts.append(spec.seed)
            if len(alive) >= most:
                raise torch.OutOfMemoryError("no room")
            self.spec = spec
            alive.append(spec.seed)

        def work(self) -> Any:
            yield from [True] * 3

        def row(self) -> dict[str, Any]:
            return {"seed": self.spec.seed, "status": "done"}

        def close(self) -> None:
            alive.remove(self.spec.seed)

    monkeypatch.setattr(scheduler, "ModelRun", Fake)
    specs = [make_spec(f"training.seeds=[{seed}]") for seed in range(4)]
    rows: list[dict[str, Any]] = []
    slots = scheduler._Slots(specs, CPU, 4, rows.append)
    while slots.busy:
        slots.turn()
    assert [row["seed"] for row in rows] == [0, 1, 2, 3] and not alive
    assert attempts == [0, 1, 2, 2, 3]
    most = 0
    assert train_all(specs[:1], CPU, 1, None, rows.append)
    assert rows[-1]["status"] == "failed" and rows[-1]["reason"] == "no room"


def test_scores_are_named_rightly() -> None:
    """Three rows: all right, half right, wrong. Token 1 is right 2 of 3 times, token 2 once of 2."""
    targets = torch.tensor([[1, 2], [1, 2], [1, -100]])
    answers = torch.tensor([[1, 2], [1, 1], [2, 0]])
    found = training.scores(answers, targets)
    expected = {"accuracy": 3 / 5, "whole_accuracy": 1 / 3, "macro_accuracy": (2 / 3 + 1 / 2) / 2}
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_failed_recording_shows_its_first_error() -> None:
    try:
        try:
            raise ValueError("the reason")
        except ValueError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
    except RuntimeError as error:
        assert str(training.first_cause(error)) == "the reason"
    assert str(training.first_cause(RuntimeError("alone"))) == "alone"


def test_layers_own_losses_are_trained(make_spec: MakeSpec) -> None:
    """MoM's balance loss is added: without it the router would end elsewhere."""
    mixer = "{type: mom, num_heads: 1, key_dim: 4, value_dim: 4, balance: %s}"
    routers = []
    for balance in (0, 5.0):
        run = trained(make_spec(f"models.mixers=[{mixer % balance}]"))
        routers.append(next(p for name, p in run.predictor.named_parameters() if "router" in name))
    assert not torch.allclose(*routers)


def test_the_budget_ends_what_runs(make_spec: MakeSpec) -> None:
    rows: list[dict[str, Any]] = []
    assert train_all([make_spec()], CPU, 1, 0.0, rows.append) is False
    assert rows == []


def test_history_is_thinned_from_the_end() -> None:
    history: list[tuple[int, float | None, float]] = [(step, 0.0, 0.0) for step in range(1, 101)]
    kept = [step for step, _, _ in thinned(history)]
    assert kept == list(range(4, 101, 4)) and thinned(history[:32]) == history[:32]


def test_cells_are_drawn_once_and_forgotten(make_spec: MakeSpec) -> None:
    cells = Cells(CPU)
    spec = make_spec()
    train, test = cells.of(spec)
    assert cells.of(make_spec("training.seeds=[9]"))[0] is train
    assert (train.rows, test.rows) == (21, 10) and not torch.equal(train.ids[:10], test.ids[:10])
    for length in (12, 16, 20, 24):
        cells.of(make_spec(f"tasks.0.settings.length={length}"))
    again = cells.of(spec)[0]
    assert again is not train and torch.equal(again.ids, train.ids)
    assert torch.equal(draw_examples(spec, "test", CPU).targets, test.targets)
