"""Copying and stories on models: generation, what is counted, the entries of a result, the verb."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longrecall import RecurrentLM
from longrecall.errors import UserError
from longrecall.evaluation import check_result, evaluate
from tests.evaluation.conftest import command
from tests.tasks.story_solver import solve


class Speaker:
    """A model that reads bytes and says what `reply(text so far)` tells, byte by byte; its state is the text."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=258)

    def __init__(self, reply: Callable[[str], str], broken: bool = False) -> None:
        self._reply, self._broken = reply, broken

    def parameters(self) -> list[Any]:
        return []

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
        before = past_key_values or [""] * len(input_ids)
        texts = [old + "".join(map(chr, row)) for old, row in zip(before, input_ids.tolist(), strict=True)]
        logits = torch.zeros(*input_ids.shape, 258)
        for row, text in enumerate(texts):
            for column in range(input_ids.shape[1]):
                logits[row, column, ord(self._reply(text[: len(text) - input_ids.shape[1] + column + 1])[0])] = 1.0
        if self._broken:
            # The argmax stays right: only its not being finite can make the answer wrong.
            logits[logits == 1.0] = float("inf")
        return SimpleNamespace(logits=logits, past_key_values=texts)

    __call__ = forward


def answering(form: str) -> Callable[[str], str]:
    """Replies with the right answer in the words of `form`, and has nothing to say before the question."""

    def reply(text: str) -> str:
        match = re.search(r"Question: ([^\n]*)\nAnswer: (.*)$", text, flags=re.DOTALL)
        if match is None:
            return "x"
        said = form.format(solve(text[: match.start()], match[1]))
        return said[len(match[2]) :] or "\n"

    return reply


def copying(right: int) -> Callable[[str], str]:
    """Copies the first `right` letters, then says what is never asked for."""

    def reply(text: str) -> str:
        string, asked, copied = text.rpartition("$")[2].partition("|")
        return string[len(copied)] if asked and len(copied) < right else "?"

    return reply


def values(result: dict[str, Any]) -> dict[str, float]:
    return {entry["metric"]: entry["value"] for entry in result["results"]}


@pytest.mark.parametrize(("right", "string"), [(8, 1.0), (6, 0.0), (0, 0.0)])
def test_copying_counts_strings_and_letters(tokenizer: Any, right: int, string: float) -> None:
    options = {"copying": {"opening": False, "trained": 5}}
    result = evaluate(Speaker(copying(right)), tokenizer, ["copying"], [8], 5, options=options, progress=False)
    check_result(result, "here")
    assert values(result) == {"accuracy": string, "character_accuracy": right / 8}
    assert [entry["count"] for entry in result["results"]] == [5, 40]
    assert result["summary"] == {"copying.accuracy": string, "copying.accuracy.length=8": string}
    assert result["settings"]["options"]["copying"]["trained"] == 5


@pytest.mark.parametrize(
    ("form", "accuracy", "exact"),
    [
        ("{}.", 1.0, 1.0),
        ("{}\n", 1.0, 1.0),
        ("I think it is the {}. Yes", 1.0, 0.0),
        ("elsewhere.", 0.0, 0.0),
        ("{}, kitchen, garden and attic.", 0.0, 1.0),
    ],
)
def test_stories_are_judged_by_what_the_model_says(tokenizer: Any, form: str, accuracy: float, exact: float) -> None:
    options = {"babilong": {"opening": False, "tasks": ("qa1",)}}
    model = Speaker(answering(form))
    result = evaluate(model, tokenizer, ["babilong"], [400], 4, options=options, progress=False, segment_tokens=150)
    assert values(result) == {"accuracy": accuracy, "exact_match": exact}
    assert [entry["cell"] for entry in result["results"]] == [{"task": "qa1", "length": 400}] * 2
    assert [entry["diverged"] for entry in result["results"]] == [0, 0]


def test_the_solver_answers_every_task_through_the_engine(tokenizer: Any) -> None:
    options = {"babilong": {"opening": False}}
    result = evaluate(Speaker(answering("{}.")), tokenizer, ["babilong"], [400], 3, options=options, progress=False)
    assert set(entry["value"] for entry in result["results"]) == {1.0}
    names = {f"babilong.accuracy.task=qa{number}" for number in range(1, 6)}
    assert result["summary"].keys() == {"babilong.accuracy", "babilong.accuracy.length=400", *names}


def test_a_model_that_diverges_is_wrong_and_counted(tokenizer: Any) -> None:
    model = Speaker(answering("{}."), broken=True)
    options = {"babilong": {"opening": False, "tasks": ("qa4",)}}
    result = evaluate(model, tokenizer, ["babilong"], [300], 3, options=options, progress=False)
    assert values(result) == {"accuracy": 0.0, "exact_match": 0.0}
    assert [entry["diverged"] for entry in result["results"]] == [3, 3]


def test_batches_change_nothing(model: RecurrentLM, tokenizer: Any) -> None:
    options = {"babilong": {"tasks": ("qa1", "qa5")}}

    def run(batch_tokens: int) -> list[Any]:
        result = evaluate(
            model,
            tokenizer,
            ["babilong", "copying"],
            [300],
            5,
            options=options,
            progress=False,
            batch_tokens=batch_tokens,
        )
        return [entry | {"seconds": 0} for entry in result["results"]]

    assert run(64) == run(100_000)


def test_the_verb(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["--tasks", "copying,babilong", "--lengths", "300", "--samples", "2", "--qa", "qa2,qa4", "--device", "cpu"]
    assert command(checkpoint, *words, "--copy-trained", "20", "--out", str(out)) == 0
    table = capsys.readouterr().out
    assert re.search(r"copying +length 300 +character_accuracy +\d\.\d{3} .* 600\n", table)
    assert re.search(r"babilong +task qa4, length 300 +accuracy ", table)
    result = json.loads(out.read_text())
    check_result(result, "here")
    assert "context_length" in result["checkpoint"]
    assert result["settings"]["options"]["babilong"]["haystack"]["characters"] > 100_000


def test_the_text_is_the_book(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_text("Nobody knows this book.")
    words = ["--tasks", "babilong", "--lengths", "300", "--samples", "1", "--qa", "qa1", "--device", "cpu", "--json"]
    assert command(checkpoint, *words, "--text", str(text)) == 0
    options = json.loads(capsys.readouterr().out)["settings"]["options"]["babilong"]
    assert options["haystack"]["characters"] == 23


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "babilong", "--qa", "qa6"], 'unknown task "qa6"; known tasks: qa1, qa2'),
        (["--tasks", "babilong", "--qa", "qa1,"], "--qa: there is an empty entry"),
        (["--tasks", "babilong", "--lengths", "99"], "length 99 is too short for qa1"),
        (["--tasks", "copying", "--copy-trained", "0"], "at least 1 letter"),
        (["--tasks", "copyin"], 'Did you mean "copying"'),
    ],
)
def test_bad_options(checkpoint: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        command(checkpoint, "--device", "cpu", *words)
