"""In-context learning and question answering on models: what is counted, sharing, the verb, broken rows."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longrecall import RecurrentLM
from longrecall.errors import UserError
from longrecall.evaluation import check_result, evaluate
from longrecall.tasks import InContext, MetaICL, PieceEncoder, QuestionAnswering, QuestionSample
from longrecall.tasks.encoding import Cell
from tests.evaluation.conftest import command
from tests.evaluation.test_questions import Speaker

DOCUMENTS = ["Box 1 is Ann's. Box 2 is Bob's.", "Box 3 is Cleo's. Box 4 is Dora's."]
OWNERS = {"1": "Ann", "2": "Bob", "3": "Cleo", "4": "Dora"}


def questions(path: Path, extra: str = "") -> str:
    rows = [
        {"context": DOCUMENTS[place // 2], "question": f"Whose is box {number}?", "answers": [owner, f"{owner}'s"]}
        for place, (number, owner) in enumerate(OWNERS.items())
    ]
    path.write_text(extra + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def owner(form: str, known: str = "1234") -> Any:
    """Says who a box belongs to, in the words of `form`, of the boxes it knows."""

    def reply(text: str) -> str:
        asked = re.search(r"Whose is box (\d)\?\nAnswer: ([^\n]*)$", text)
        if asked is None:
            return "x"
        said = form.format(OWNERS[asked[1]] if asked[1] in known else "Zoe")
        return said[len(asked[2]) :] or "\n"

    return reply


def values(result: dict[str, Any]) -> dict[str, float]:
    return {entry["metric"]: entry["value"] for entry in result["results"]}


@pytest.mark.parametrize(
    ("form", "known", "accuracy", "f1", "exact"),
    [
        ("{}", "1234", 1.0, 1.0, 1.0),
        ("the {}!", "12", 0.5, 0.5, 0.5),
        ("it is {}", "1234", 1.0, 0.5, 0.0),  # one of three words is right, all of one is found
        ("{}", "", 0.0, 0.0, 0.0),
    ],
)
def test_what_the_model_says_is_counted(
    tokenizer: Any, tmp_path: Path, form: str, known: str, accuracy: float, f1: float, exact: float
) -> None:
    task = QuestionAnswering(("own",), questions(tmp_path / "rows.jsonl"), answer_tokens=20, opening=False)
    result = evaluate(Speaker(owner(form, known)), tokenizer, [task], [512], 100, progress=False)
    check_result(result, "here")
    found = values(result)
    # Means of a few equal numbers: only their sum is rounded.
    assert [found[name] for name in ("accuracy", "f1", "exact")] == pytest.approx([accuracy, f1, exact], rel=1e-12)
    for entry in result["results"]:
        # All four rows there are, in two documents.
        assert (entry["count"], entry["sequences"]) == (4, 2)
    assert result["summary"]["question_answering.accuracy"] == accuracy


def parity(text: str) -> str:
    """Learns from the demonstrations of a prompt which label means what; guesses nothing before the question."""
    *shown, asked = text.split("\n\n\n")
    labels = {int(number) % 2: label for number, label in (pair.split("\n") for pair in shown)}
    number, _, said = asked.partition("\n")
    label = labels.get(int(number) % 2) if number.isdigit() else None
    if label is None:
        return "x"
    return ("\n" + label)[len(said) + 1 if "\n" in asked else 0 :] or "x"


@pytest.mark.parametrize("broken", [False, True])
def test_the_likeliest_option_is_the_choice(tokenizer: Any, broken: bool) -> None:
    task = InContext(("parity",), (8,), opening=False)
    result = evaluate(Speaker(parity, broken), tokenizer, [task], [512], 12, progress=False)
    check_result(result, "here")
    (entry,) = result["results"]
    assert (entry["metric"], entry["count"], entry["sequences"]) == ("accuracy", 12, 12)
    # Infinite logits make an answer wrong, whatever it was.
    assert (entry["value"], entry["diverged"]) == ((0.0, 12) if broken else (1.0, 0))


class Unshared(QuestionAnswering):
    """The same questions, each with its document read anew."""

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
        return replace(super().sample(encode, cell, index, seed), shared=0)


def test_sharing_a_document_changes_no_answer(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    path = questions(tmp_path / "rows.jsonl")
    both = [
        evaluate(model, tokenizer, [kind(("own",), path, metrics=("f1", "contains"))], [512], 4, progress=False)
        for kind in (QuestionAnswering, Unshared)
    ]
    for one, other in zip(both[0]["results"], both[1]["results"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert both[0]["settings"]["options"] == both[1]["settings"]["options"]


def test_demonstrations_shared_by_a_cell_leave_its_questions_independent(
    model: RecurrentLM, tokenizer: Any, tmp_path: Path
) -> None:
    for part in ("train", "test"):
        rows = [{"input": f"{part} {n}", "output": "ab"[n % 2], "options": ["a", "b"]} for n in range(10)]
        (tmp_path / f"own_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = MetaICL(("own",), str(tmp_path), shots=(4,), draws=(13, 21))
    result = evaluate(model, tokenizer, [task], [512], 256, progress=False)
    check_result(result, "here")
    assert [(entry["count"], entry["sequences"]) for entry in result["results"]] == [(10, 10)] * 2


def test_the_verb(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [checkpoint, "--tasks", "in_context,question_answering", "--samples", "3", "--device", "cpu", "--json"]
    words += ["--option", "in_context.mappings=parity,lexicon", "--option", "in_context.shots=2"]
    words += ["--option", "question_answering.datasets=own", "--option", "question_answering.prompts=once,twice"]
    results = []
    for name in ("here.jsonl", "there.jsonl"):
        path = questions(tmp_path / name)
        assert command(*words, "--option", f"question_answering.data={path}") == 0
        results.append(json.loads(capsys.readouterr().out))
    names = [(entry["task"], entry["metric"], entry["count"]) for entry in results[0]["results"]]
    metrics = ("accuracy", "exact_match", "f1", "exact")
    assert names == [("in_context", "accuracy", 3)] * 2 + [("question_answering", name, 3) for name in metrics] * 2
    # Where the file lies is no part of what was asked.
    assert results[0]["settings"] == results[1]["settings"]
    assert results[0]["task_definition"] == results[1]["task_definition"]


def test_the_verb_on_a_broken_row(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = questions(tmp_path / "rows.jsonl", extra="{oops\n")
    words = [checkpoint, "--tasks", "question_answering", "--samples", "9", "--device", "cpu", "--json"]
    words += ["--option", "question_answering.datasets=own", "--option", f"question_answering.data={path}"]
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1: it is not JSON"):
        command(*words)
    with pytest.warns(UserWarning, match="left out 1 broken rows"):
        assert command(*words, "--option", "question_answering.skip_broken=true") == 0
    result = json.loads(capsys.readouterr().out)
    facts = result["settings"]["options"]["question_answering"]["data"]["own"]
    assert (facts["rows"], facts["skipped"]) == (4, 1) and {entry["count"] for entry in result["results"]} == {4}


def test_a_missing_package_stops_the_run_before_the_work(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    words = [checkpoint, "--tasks", "question_answering", "--option", "question_answering.datasets=own"]
    words += ["--option", f"question_answering.data={questions(tmp_path / 'rows.jsonl')}"]
    with pytest.raises(UserError, match=r"bleu needs sacrebleu"):
        command(*words, "--option", "question_answering.metrics=f1,bleu", "--out", str(tmp_path / "out.json"))
    assert not list(tmp_path.glob("out.json*"))
