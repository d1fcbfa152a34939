from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.sweep import scheduler, slots, training
from longrecall.sweep.examples import Cells, draw_examples
from longrecall.sweep.grid import RunSpec, sizes
from longrecall.sweep.scheduler import shares, train_all
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

        def mark(self) -> None:
            return None

        def row(self) -> dict[str, Any]:
            return {"seed": self.spec.seed, "status": "done"}

        def close(self) -> None:
            alive.remove(self.spec.seed)

    monkeypatch.setattr(slots, "ModelRun", Fake)
    specs = [make_spec(f"training.seeds=[{seed}]") for seed in range(4)]
    rows: list[dict[str, Any]] = []
    queue = iter(specs)
    slots.Slots(lambda: next(queue, None), CPU, 4, rows.append).work(None)
    assert [row["seed"] for row in rows] == [0, 1, 2, 3] and not alive
    assert attempts == [0, 1, 2, 2, 3]
    most = 0
    assert train_all(specs[:1], CPU, 1, None, rows.append)
    assert rows[-1]["status"] == "failed" and rows[-1]["reason"] == "no room"
    handed_back: list[RunSpec] = []
    queue = iter(specs[:1])
    slots.Slots(lambda: next(queue, None), CPU, 4, rows.append, handed_back.append).work(None)
    assert handed_back == specs[:1] and len(rows) == 5


def test_scores_are_named_rightly() -> None:
    """Three rows: all right, half right, wrong. Token 1 is right 2 of 3 times, token 2 once of 2."""
    targets = torch.tensor([[1, 2], [1, 2], [1, -100]])
    answers = torch.tensor([[1, 2], [1, 1], [2, 0]])
    found = training.scores(answers, targets)
    macro = (2 / 3 + 1 / 2) / 2
    expected = {"accuracy": 3 / 5, "whole_accuracy": 1 / 3, "macro_accuracy": macro, "mad_accuracy": macro}
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


def test_what_the_budget_stops_is_told(make_spec: MakeSpec) -> None:
    """A run of a year: its row as far as it got, and no row that counts."""
    rows: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    specs = [make_spec("training.epochs=100000000"), make_spec("training.seeds=[1]")]
    assert train_all(specs, CPU, 1, time.time() + 0.5, rows.append, on_running=running.append) is False
    assert rows == [] and [row["key"] for row in running] == [specs[0].key]
    assert running[0]["status"] == "running" and running[0]["steps"] > 0


def test_a_run_is_never_far_ahead_of_the_gpu() -> None:
    """An event is awaited when `STEPS_AHEAD` steps have been enqueued behind it, and only then."""
    marks: list[int] = []
    awaited: list[tuple[int, int]] = []

    class Fake:
        def work(self) -> Any:
            yield from [True] * 12 + [False] + [True]

        def mark(self) -> int:
            marks.append(len(marks))
            return marks[-1]

        def reached(self, event: int) -> Any:
            awaited.append((event, len(marks)))
            yield False

    yielded = list(slots.paced(cast("ModelRun", Fake())))
    assert awaited == [(step, step + slots.STEPS_AHEAD + 1) for step in range(13 - slots.STEPS_AHEAD)]
    assert sum(yielded) == 13 == len(marks) and len(yielded) == 14 + len(awaited)


@pytest.mark.parametrize(("parallel", "processes"), [(5, 2), (4, 4), (14, 3), (1, 1)])
def test_processes_share_the_runs(parallel: int, processes: int) -> None:
    found = shares(parallel, processes)
    assert len(found) == processes and sum(found) == parallel and max(found) - min(found) <= 1


@pytest.mark.slow
def test_a_killed_process_is_an_error(make_spec: MakeSpec) -> None:
    """The others are ended too, and what had its row before keeps it."""
    specs = [make_spec(), make_spec("training.epochs=100000000"), make_spec("training.epochs=100000001")]
    rows: list[dict[str, Any]] = []

    def kill_one(row: dict[str, Any]) -> None:
        rows.append(row)
        multiprocessing.active_children()[0].kill()

    with pytest.raises(UserError, match="exit code -9"):
        train_all(specs, CPU, 2, None, kill_one)
    assert [row["key"] for row in rows] == [specs[0].key]
    assert not multiprocessing.active_children()


def test_what_had_no_room_gets_it_afterwards(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes hand a run back; it is trained when they have ended, and its row counts once."""
    specs = [make_spec(), make_spec("training.seeds=[1]")]
    monkeypatch.setattr(scheduler, "train_in_processes", lambda given, *_: list(given)[1:])
    rows: list[dict[str, Any]] = []
    assert train_all(specs, CPU, 2, None, rows.append) is False
    assert [row["key"] for row in rows] == [specs[1].key]


def test_the_precision_of_products_ends_with_the_sweep(make_spec: MakeSpec) -> None:
    rows: list[dict[str, Any]] = []
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        assert train_all([make_spec()], CPU, 1, None, rows.append, matmul_precision=precision)
    assert [row["matmul_precision"] for row in rows] == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == before
    # Most CPUs do not round the factors; one that does keeps ten bits of them.
    losses = [[entry[1] for entry in row["history"]] for row in rows]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_history_is_thinned_from_the_end() -> None:
    history: list[tuple[int, float | None, float]] = [(step, 0.0, 0.0) for step in range(1, 101)]
    kept = [step for step, _, _ in thinned(history)]
    assert kept == list(range(4, 101, 4)) and thinned(history[:32]) == history[:32]


def test_cells_are_drawn_once_and_forgotten(make_spec: MakeSpec) -> None:
    cells = Cells(CPU)
    spec = make_spec()
    (train,), (test,) = cells.of(spec)
    assert cells.of(make_spec("training.seeds=[9]"))[0][0] is train
    assert (train.rows, test.rows) == (21, 10) and not torch.equal(train.ids[:10], test.ids[:10])
    for length in (12, 16, 20, 24):
        cells.of(make_spec(f"tasks.0.settings.length={length}"))
    (again,) = cells.of(spec)[0]
    assert again is not train and torch.equal(again.ids, train.ids)
    assert torch.equal(draw_examples(spec, spec.test_parts[0], "test", CPU).targets, test.targets)
