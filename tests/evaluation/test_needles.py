"""Needles on models: generation, grades, fill, and the search for the maximum recall length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.evaluation import check_result, evaluate
from longrecall.evaluation.graded import bounded_mean_interval
from longrecall.evaluation.recall_search import search_recall_length
from tests.evaluation.conftest import command
from tests.evaluation.test_questions import Speaker

QUESTION = re.compile(r"magic number for ([a-z-]+) mentioned in the provided text is ([^\n]*)$")


def finding(form: str = "{}.", memory: int = 10**9) -> Callable[[str], str]:
    """Says the hidden number in the words of `form`, unless the needle is more than `memory` letters away."""

    def reply(text: str) -> str:
        match = QUESTION.search(text[-200:])
        if match is None:
            return "x"
        needle = text.find(f"for {match[1]} is: ")
        near = len(text) - needle < memory
        said = form.format(text[needle:].split(": ")[1][:7]) if near else "no"
        return said[len(match[2]) :] or "\n"

    return reply


def by_metric(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["metric"]: entry for entry in result["results"]}


OPTIONS = {"niah_single_1": {"opening": False, "answer_tokens": 24}}


@pytest.mark.parametrize(
    ("form", "accuracy", "exact", "score"),
    [("{}.", 1.0, 1.0, 5.0), ("it is {}", 1.0, 0.0, 5.0), ("{:.4}xx", 0.0, 0.0, 5 * 4 / 7), ("no", 0.0, 0.0, 0.0)],
)
def test_what_the_model_says_is_graded(tokenizer: Any, form: str, accuracy: float, exact: float, score: float) -> None:
    model = Speaker(finding(form))
    result = evaluate(model, tokenizer, ["niah_single_1"], [600], 4, options=OPTIONS, progress=False)
    check_result(result, "here")
    found = by_metric(result)
    values = {metric: entry["value"] for metric, entry in found.items()}
    expected = {"accuracy": accuracy, "exact_match": exact, "contains": accuracy, "prefix_score": score}
    # Means of equal numbers: only their sum is rounded.
    assert values == pytest.approx(expected, rel=1e-12)
    for entry in found.values():
        assert entry["cell"] == {"length": 600} and entry["count"] == entry["sequences"] == 4
        assert entry["low"] <= entry["value"] <= entry["high"] and entry["low"] < entry["high"]
        assert 0.8 < entry["fill"] < 1.0
    assert found["prefix_score"]["high"] <= 5.0 and found["contains"]["high"] <= 1.0
    assert found["prefix_score"]["outcomes"]["form"] == "scores"


def test_generation_stops_when_the_answer_is_settled(tokenizer: Any) -> None:
    asked = []

    class Counting(Speaker):
        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
            asked.append(input_ids.shape[1])
            return super().forward(input_ids, past_key_values, use_cache)

        __call__ = forward

    evaluate(Counting(finding()), tokenizer, ["niah_single_1"], [600], 1, options=OPTIONS, progress=False)
    # The first digit follows from the prompt, six more from one token each.
    assert asked.count(1) == 6


def test_a_model_that_diverges_scores_nothing(tokenizer: Any) -> None:
    model = Speaker(finding(), broken=True)
    result = evaluate(model, tokenizer, ["niah_single_1"], [600], 3, options=OPTIONS, progress=False)
    assert {entry["value"] for entry in result["results"]} == {0.0}
    assert {entry["diverged"] for entry in result["results"]} == {3}


def test_bounded_intervals() -> None:
    assert bounded_mean_interval(5.0, 5.0, 10)[1] == 5.0 and bounded_mean_interval(5.0, 5.0, 10)[0] < 4.0
    low, high = bounded_mean_interval(2.5, 5.0, 100)
    # Wilson's interval of 50 of 100, five times as large.
    assert low == pytest.approx(5 * 0.4038, abs=5e-4) and high == pytest.approx(5 * 0.5962, abs=5e-4)


def search(tokenizer: Any, memory: int, longest: int | str = 2048, **more: Any) -> dict[str, Any]:
    # The needle comes first and the question last, so whether it is found depends on the length alone.
    options = {"niah_single_1": {"opening": False, "answer_tokens": 8, "depths": (0.0,)}}
    settings = {"step": 256, "options": options, "progress": False, **more}
    return search_recall_length(Speaker(finding(memory=memory)), tokenizer, "niah_single_1", longest, 2, **settings)


def test_the_search_stops_after_the_first_length_that_fails(tokenizer: Any) -> None:
    result = search(tokenizer, memory=1300)
    check_result(result, "here")
    # 256 and fewer letters do not hold the question; 1536 - 8 less the instruction (138) is beyond the memory.
    assert result["settings"]["lengths"] == [512, 768, 1024, 1280, 1536]
    assert [entry["value"] for entry in result["results"] if entry["metric"] == "accuracy"] == [1, 1, 1, 1, 0]
    lengths = {name: value for name, value in result["summary"].items() if "recall_length" in name}
    assert lengths == {f"niah_single_1.recall_length.threshold={level}": 1280 for level in (0.5, 0.6, 0.7, 0.8)}
    assert result["settings"]["search"]["at_least"] == []
    # Two of two is [.342, 1] and none of two [0, .658], by Wilson: .6 may still be held at 1536, .7 not.
    intervals = {
        level: result["summary_intervals"][f"niah_single_1.recall_length.threshold={level}"] for level in (0.6, 0.7)
    }
    assert intervals == {0.6: [0, 1536], 0.7: [0, 1280]}


def test_a_search_that_nothing_fails_says_at_least(tokenizer: Any) -> None:
    result = search(tokenizer, memory=10**9, longest=1100, thresholds=(0.9, 0.25))
    assert result["settings"]["lengths"] == [512, 768, 1024]
    assert result["summary"]["niah_single_1.recall_length.threshold=0.9"] == 1024
    assert result["settings"]["search"]["at_least"] == [0.25, 0.9]
    assert result["summary_intervals"]["niah_single_1.recall_length.threshold=0.25"] == [1024, 1024]


def test_a_model_that_recalls_nothing_costs_one_length(tokenizer: Any) -> None:
    result = search(tokenizer, memory=0)
    assert result["settings"]["lengths"] == [512]
    assert result["summary"]["niah_single_1.recall_length.threshold=0.5"] == 0


def test_an_interrupted_search_goes_on_and_a_finished_one_is_read(tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "search.json"
    whole = search(tokenizer, memory=1300, out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]
    assert json.loads(out.read_text())["summary"] == whole["summary"]
    assert search(tokenizer, memory=1300, out=out, resume=True)["created"] == whole["created"]
    with pytest.raises(UserError, match=r"cannot resume .*other settings \(longest\)"):
        search(tokenizer, memory=1300, longest=1024, out=out, resume=True)
    with pytest.raises(UserError, match=r"search.json exists already; --resume"):
        search(tokenizer, memory=1300, out=out)
    out.unlink()

    class Killed(Exception):
        pass

    def killed(text: str) -> str:
        if len(text) > 900:
            raise Killed
        return finding(memory=1300)(text)

    options = {"niah_single_1": {"opening": False, "answer_tokens": 8, "depths": (0.0,)}}
    with pytest.raises(Killed):
        search_recall_length(
            Speaker(killed), tokenizer, "niah_single_1", 2048, 2, step=256, options=options, progress=False, out=out
        )
    assert (tmp_path / "search.json.768").exists() and not out.exists()
    with pytest.raises(UserError, match=r"search.json.1024.partial holds an interrupted run"):
        search(tokenizer, memory=1300, out=out)

    def reluctant(text: str) -> str:
        assert len(text) < 20 or "provided text is" not in text or len(text) > 900, "a finished length was read again"
        return finding(memory=1300)(text)

    again = search_recall_length(
        Speaker(reluctant),
        tokenizer,
        "niah_single_1",
        2048,
        2,
        step=256,
        options=options,
        progress=False,
        out=out,
        resume=True,
    )
    assert again["summary"] == whole["summary"] and [path.name for path in tmp_path.iterdir()] == ["search.json"]
    (tmp_path / "search.json.700").write_text("of an interrupted search with other steps")
    assert search(tokenizer, memory=1300, out=out, force=True)["summary"] == whole["summary"]
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"longest": 100}, "below one step of 256"),
        ({"longest": 256}, "is too short: needles, question"),
        ({"thresholds": (0.5, 1.0)}, "thresholds must lie between 0 and 1"),
        ({"thresholds": ()}, "thresholds must lie between 0 and 1"),
        ({"resume": True}, "resume needs an output file"),
        ({"step": "x"}, "length 'x'"),
    ],
)
def test_bad_searches(tokenizer: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        search(tokenizer, 0, **more)


def test_a_task_without_lengths_cannot_be_searched(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="task phonebook has no length to grow"):
        search_recall_length(Speaker(finding()), tokenizer, "phonebook", 1024, 2)


def test_the_verb_runs_needles(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "book.txt"
    book.write_text("A fox ran by. The rain fell all day long. " * 30)
    words = ["--tasks", "niah_single_2,passkey_spoken", "--lengths", "700", "--samples", "2", "--depths", "0.5"]
    assert command(checkpoint, *words, "--text", str(book), "--device", "cpu") == 0
    table = capsys.readouterr().out
    assert re.search(r"niah_single_2 +length 700, haystack own +prefix_score +[0-5]\.\d{3}", table)
    assert re.search(r"passkey_spoken +length 700, depth 0\.5 +contains +[01]\.\d{3}", table)


def test_the_verb_searches(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search.json"
    words = ["--tasks", "niah_single_3", "--search", "2k", "--samples", "2", "--device", "cpu", "--out", str(out)]
    assert command(checkpoint, *words) == 0
    # A random model finds nothing: one length, the first multiple of 512 that holds the question in bytes.
    assert "niah_single_3.recall_length.threshold=0.8: 0" in capsys.readouterr().out
    assert json.loads(out.read_text())["settings"]["lengths"] == [1024]
    with pytest.raises(UserError, match="--search takes one task"):
        command(checkpoint, "--tasks", "niah_single_3,passkey", "--search", "2k")
    with pytest.raises(UserError, match="--search: length 'far'"):
        command(checkpoint, "--tasks", "niah_single_3", "--search", "far")
