"""Evaluation while a model trains: it measures what `eval` measures, changes nothing of the training, may end it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import longrecall
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation.engine import evaluate
from longrecall.evaluation.token_bytes import bytes_of_tokens
from longrecall.models.byte_tokenizer import END_ID, byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery.handover import handover_layers
from longrecall.training.evaluation import Share, Standing, prepare_evaluation
from longrecall.training.evaluation_steps import evaluate_after
from longrecall.training.initial_states import Zero
from longrecall.training.logs import Stopwatch
from longrecall.training.recipe import Recipe
from longrecall.training.recipe_evaluation import EvaluationRecipe, StopRecipe, TaskRecipe
from longrecall.training.run import run_recipe
from longrecall.training.segments import Segments
from longrecall.training.watch import FiniteWatch
from tests.conftest import MIXERS
from tests.training.interventions import override
from tests.training.runs import Killed, equal, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]
TASKS = (
    "[{kind: passkey, lengths: [160], samples: 3, options: {depths: [0.5]}}, "
    "{kind: niah_single_1, lengths: [640], samples: 1, options: {answer_tokens: 4}}]"
)


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    """A text that training does not read, as a section of the recipe: 5 sequences of 48 bytes."""
    path = tmp_path / "held_out.txt"
    path.write_text("A bear met a fox.\f" + "It went on in the wood. " * 40, "utf-8")
    return f"{{sources: [{{kind: text, path: {path}}}], tokens: 200, batch_size: 2}}"


def section(held_out: str = "none", tasks: str = "[]", **others: Any) -> str:
    rest = "".join(f", {key}: {value}" for key, value in ({"every": 2} | others).items())
    return f"evaluation={{held_out: {held_out}, tasks: {tasks}{rest}}}"


def parted(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the training and those of the evaluation, these without their seconds."""
    own = [
        row | {"evaluation": {k: v for k, v in row["evaluation"].items() if k != "seconds"}}
        for row in rows
        if "evaluation" in row
    ]
    return [row for row in rows if "evaluation" not in row], own


def test_it_changes_nothing_and_measures_what_eval_measures(
    make_recipe: MakeRecipe, held_out: str, tmp_path: Path
) -> None:
    plain = train(make_recipe())
    recipe = make_recipe(
        section(held_out, TASKS, at_start="true"), f"run.output={tmp_path / 'with'}", "run.save_every=2"
    )
    torch.manual_seed(5)
    rows, measured = parted(train(recipe))
    assert rows == plain
    assert [row["step"] for row in measured] == [0, 2, 4, 6]
    model, tokenizer = longrecall.load(tmp_path / "with" / "final"), byte_tokenizer()
    numbers = measured[-1]["evaluation"]
    for task in recipe.evaluation.tasks if recipe.evaluation else ():
        found = evaluate(model, tokenizer, [task.make()], task.lengths, task.samples, progress=False)
        for entry in found["results"]:
            assert numbers[f"{entry['task']}.{entry['metric']}"] == entry["value"]
    told = json.loads((tmp_path / "with" / "training.json").read_text())
    assert [row["step"] for row in told["evaluation"]["log"]] == [0, 2, 4, 6] and [
        row["step"] for row in told["log"]
    ] == list(range(1, 7))


def test_the_held_out_loss_is_the_mean_over_labels(make_recipe: MakeRecipe, held_out: str, base: Path) -> None:
    """In batches of 2, of which the last is padded, and in the shares of two processes."""
    model = longrecall.load(base)
    for apart in ("false", "true"):
        evaluation = prepare_evaluation(
            make_recipe(section(held_out), f"data.reset_documents={apart}"), byte_tokenizer()
        )
        assert evaluation is not None and evaluation._held_out is not None
        sequences = evaluation._held_out
        numbers = sequences.measure(model, Zero(), Share(0, 1, False, lambda tensor: tensor))
        nats = 0.0
        for ids, starts in zip(sequences.ids, sequences.starts, strict=True):
            pieces = Segments.of([starts if apart == "true" else (0,)], 48).inputs(ids[None], ids[None])
            with torch.no_grad():
                nats += float(model(**pieces).loss) * 47
        size = int((sequences.ids[:, 1:] < 256).sum())  # the end token stands for no byte
        assert sequences.ids.shape == (5, 48) and size < 5 * 47
        # 1e-5: float32 sums of other batches.
        assert numbers["held_out.loss"] == pytest.approx(nats / (5 * 47), rel=1e-5)
        assert numbers["held_out.bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        share = [sequences.measure(model, Zero(), Share(rank, 2, False, lambda tensor: tensor)) for rank in range(2)]
        assert sum(part["held_out.loss"] or 0 for part in share) == pytest.approx(numbers["held_out.loss"], rel=1e-6)


def test_bytes_of_tokens() -> None:
    class Spelled:
        """Sentencepiece spells bytes it has no token for as <0x..>; the last id is special."""

        all_special_ids = (3,)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["\u2581caf\u00e9", "<0xE2>", "s", "</s>"][token] for token in ids]

    assert bytes_of_tokens(Spelled(), np.array([[0, 1], [2, 3]])).tolist() == [[6, 1], [1, 0]]
    assert bytes_of_tokens(byte_tokenizer(), np.array([65, 200, END_ID])).tolist() == [1, 1, 0]


@pytest.mark.parametrize("mixer", ["attention", "gated_delta_net"])
def test_training_goes_on_after_inference(
    make_recipe: MakeRecipe, make_model: Callable[..., RecurrentLM], base: Path, held_out: str, mixer: str
) -> None:
    """Nothing that inference keeps (rotary tables, packed weights) is left for training, or kept while weights move."""
    save(make_model(MIXERS[mixer], MIXERS["gla"]), base, byte_tokenizer(), force=True)
    plain = train(make_recipe("run.steps=2"))
    rows, measured = parted(
        train(make_recipe("run.steps=2", section(held_out, TASKS, at_start="true", every=1)), force=True)
    )
    assert rows == plain
    assert len({row["evaluation"]["held_out.loss"] for row in measured}) == 3


def test_a_killed_run_ends_as_one_that_was_not(
    make_recipe: MakeRecipe, held_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of evaluations without a better metric goes on: the rate is too high, and both runs stop alike."""
    chosen = (
        section(held_out, stop="{patience: 3}", best="true"),
        *(
            "optimizer.schedule=constant",
            "optimizer.learning_rate=0.3",
            "run.save_every=2",
            "run.steps=40",
            "run.keep=40",
        ),
    )
    recipe = make_recipe(*chosen, f"run.output={tmp_path / 'whole'}")
    whole = train(recipe)
    summary = json.loads((tmp_path / "whole" / "training.json").read_text())
    best, stopped = summary["evaluation"]["best"], summary["evaluation"]["stopped_at"]
    rows, measured = parted(whole)
    assert summary["summary"]["stopped_early"] and stopped == summary["summary"]["steps"] == rows[-1]["step"] < 40
    losses = {row["step"]: row["evaluation"]["held_out.loss"] for row in measured}
    assert best == {
        "metric": "held_out.loss",
        "step": min(losses, key=losses.__getitem__),
        "value": min(losses.values()),
    }
    assert stopped == best["step"] + 6
    assert equal(weights(tmp_path / "whole" / "best"), weights(tmp_path / "whole" / f"steps/step-{best['step']:08d}"))
    assert equal(weights(tmp_path / "whole" / "final"), weights(tmp_path / "whole" / f"steps/step-{stopped:08d}"))
    killed = make_recipe(*chosen, f"run.output={tmp_path / 'killed'}")
    with monkeypatch.context() as patch:
        kill_after(patch, 2 * (stopped - 1) - 1)
        with pytest.raises(Killed):
            train(killed)
    assert [parted([row])[1] or row for row in train(killed, resume=True)] == [parted([row])[1] or row for row in whole]
    assert equal(weights(tmp_path / "killed" / "best"), weights(tmp_path / "whole" / "best"))
    # A run that has stopped stays so.
    again = run_recipe(recipe, resume=True, show_progress=False)
    assert (again.steps, again.stopped_early, again.resumed_from, again.best) == (stopped, True, stopped, best)
    assert "stopped early after step" in again.table()


def test_during_a_handover_nothing_is_best_and_nothing_stops(
    make_recipe: MakeRecipe, make_model: Callable[..., RecurrentLM], held_out: str, tmp_path: Path
) -> None:
    old = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8}
    model = make_model({"type": "handover", "old": old, "new": {**old, "key_dim": 8}}, old)
    save(model, tmp_path / "bigger", byte_tokenizer(), [{"method": "merge_heads", "init": "handover", "touched": []}])
    recipe = make_recipe(
        f"model.checkpoint={tmp_path / 'bigger'}",
        section(held_out, stop="{patience: 1, minimum_change: 1000}", best="true", every=1),
        "handover={start: 0, end: 0.5}",
        "run.steps=8",
    )
    summary = run_recipe(recipe, show_progress=False)
    # Steps 1 to 3 are under the handover; step 4 is the first that counts, step 5 is better by too little.
    assert summary.best is not None and (summary.best["step"], summary.steps) == (5, 5)
    best = longrecall.load(tmp_path / "out" / "best")
    assert not handover_layers(best.config) and best.config.layers[0]["mixer"]["key_dim"] == 8
    assert not (tmp_path / "out" / ".best.unfinished").exists()


def test_a_learned_state_is_measured(make_recipe: MakeRecipe, held_out: str) -> None:
    """The weights are frozen, so that the held-out loss moves with the state alone; nothing is drawn for it."""
    chosen = (override("learned", freeze=True, learning_rate=0.3), "optimizer.schedule=constant")
    plain = train(make_recipe(*chosen))
    rows, measured = parted(train(make_recipe(*chosen, section(held_out, at_start="true")), force=True))
    losses = [row["evaluation"]["held_out.loss"] for row in measured]
    assert rows == plain and len(set(losses)) == 4


def test_the_standing_of_a_metric() -> None:
    task = (TaskRecipe("passkey"),)
    recipe = EvaluationRecipe(every=1, tasks=task, stop=StopRecipe(2, 0.1))
    standing, seen = Standing(), []
    for step, value in enumerate((0.2, 0.25, 0.5, None, 0.55)):
        standing = standing.after(step, value, recipe)
        seen.append((standing.best, standing.best_step, standing.waited, standing.stopped))
    # The smallest gain is a new best; whether training goes on is asked of the last one that was large enough.
    assert seen == [(0.2, 0, 0, False), (0.25, 1, 1, False), (0.5, 2, 0, False), (0.5, 2, 1, False), (0.55, 4, 2, True)]
    slow = Standing()
    for step, value in enumerate((0.2, 0.27, 0.34)):
        slow = slow.after(step, value, recipe)
    assert (slow.best_step, slow.waited, slow.stopped) == (2, 0, False)
    # As an older checkpoint has it.
    old = {key: value for key, value in asdict(Standing().after(0, 0.2, recipe)).items() if key != "mark"}
    assert Standing(**old).after(1, 0.25, recipe).waited == 1 and Standing(**old).after(1, 0.31, recipe).waited == 0
    assert not EvaluationRecipe(every=1, tasks=task, metric="passkey.accuracy.length=512").lower_is_better


def test_processes_that_measured_other_numbers_decide_alike() -> None:
    """Numbers of the first process decide in all: one alone would wait for ever for those that stopped."""
    recipe = EvaluationRecipe(every=1, tasks=(TaskRecipe("passkey"),), stop=StopRecipe(1, 0.0))
    judged: list[Any] = []
    evaluation = SimpleNamespace(
        recipe=recipe, standing=Standing(), due=lambda *_: True, measure=lambda *_: {"held_out.loss": 2.0},
        judge=lambda step, numbers, counts: judged.append(numbers),
    )  # fmt: skip
    gather = lambda own: [{"held_out.loss": 1.0}, own]  # noqa: E731
    place = SimpleNamespace(rank=1, world=2, sharded=True, first=False, gather=gather)
    run: Any = SimpleNamespace(
        evaluation=evaluation, processes=place, watch=FiniteWatch(), model=None, initial=None, handovers=[]
    )
    logged: list[Any] = []
    trainer: Any = SimpleNamespace(compute_loss_context_manager=None, log=logged.append)
    assert not evaluate_after(run, trainer, Stopwatch(), 1, False, 1.0)
    assert judged == [{"held_out.loss": 1.0}] and logged == [{"eval_held_out.loss": 1.0}]


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ("{every: 0, tasks: [{kind: passkey}]}", "evaluation: every must be above 0"),
        ("{every: 5}", "evaluation: nothing is measured; give held_out or tasks"),
        ("{every: 5, tasks: [{kind: passky}]}", 'Did you mean "passkey"'),
        ("{every: 5, tasks: [{kind: passkey}, {kind: passkey}]}", "passkey is listed 2 times"),
        (
            "{every: 5, tasks: [{kind: passkey, options: {digit: 3}}]}",
            'unknown key "options.digit".*Did you mean "digits"',
        ),
        ("{every: 5, tasks: [{kind: bits_per_byte}]}", "bits_per_byte needs a text"),
        ("{every: 5, tasks: [{kind: copying}]}", "give lengths: copying counts them in letters"),
        ("{every: 5, tasks: [{kind: passkey, text: x.txt}]}", "passkey reads no text"),
        (
            "{every: 5, tasks: [{kind: passkey}], metric: pass.key}",
            'metric "pass.key" is not measured.*"passkey.accuracy"',
        ),
        ("{every: 5, tasks: [{kind: passkey}], stop: {patience: 0}}", "patience must be above 0"),
        ("{every: 5, held_out: {sources: []}}", "evaluation.held_out: sources is empty"),
        ("{every: 5, held_out: {sources: [{kind: text, path: none.txt}]}}", "evaluation.held_out: sources.0 .text."),
        ("{every: 5, tasks: [{kind: passkey}]}", "evaluation.tasks.0 .passkey.: passkey: length 48 is too short"),
        ("{every: 5, tasks: [{kind: bits_per_byte, text: none.txt}]}", "cannot read the text file none.txt"),
    ],
)
def test_bad_sections_are_one_line(make_recipe: MakeRecipe, evaluation: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_recipe(make_recipe(f"evaluation={evaluation}"), dry_run=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="start from the zero state"):
        make_recipe("evaluation={every: 5, tasks: [{kind: passkey}]}", override("learned"))


def test_the_dry_run_says_what_is_measured(
    make_recipe: MakeRecipe, held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump(make_recipe(section(held_out, TASKS, stop="{patience: 2}")).to_dict())
    )
    assert main(["train", str(tmp_path / "r.yaml"), "--dry-run"]) == 0
    line = "every 2 steps: held-out 5 x 48 tokens, passkey, niah_single_1; stops after 2 without a better held_out.loss"
    assert line in capsys.readouterr().out
