"""Comparing result files: the numbers, what is refused and why, and the command on real checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation import compare_files
from longrecall.evaluation.outcomes import pack_answers, pack_scores, unpack
from longrecall.evaluation.paired import holm
from longrecall.evaluation.results import GENERATOR, definition, joined, summarise, summary_intervals

from .conftest import tiny_model

RECORDED = Path(__file__).parents[2] / "experiments" / "results" / "demo"
OPTIONS = {"passkey": {"form": "statex", "digits": 5}, "phonebook": {"letters": 2}, "bits_per_byte": {"text": "abc"}}


def entry(
    task: str, cell: dict[str, Any], right: list[int], asked: int = 1, metric: str = "accuracy"
) -> dict[str, Any]:
    total = asked * len(right)
    common = {"task": task, "cell": cell, "metric": metric, "count": total, "low": 0.0, "high": 1.0}
    return common | {"value": sum(right) / total, "outcomes": pack_answers(right, [asked] * len(right))}


def bits(start: int, scores: list[float]) -> dict[str, Any]:
    weights = [100] * len(scores)
    common = {"task": "bits_per_byte", "cell": {"start": start, "end": 2 * start}, "metric": "bits_per_byte"}
    outcomes = pack_scores(scores, weights)
    return common | {"value": sum(scores) / sum(weights), "count": 9, "low": None, "high": None, "outcomes": outcomes}


def result(*entries: dict[str, Any], options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    options = options or OPTIONS
    return {
        "schema": 1,
        "kind": "evaluation",
        "environment": {},
        "summary": {},
        "checkpoint": {"path": "x", "fingerprint": "f"},
        "settings": {"samples": 64, "seed": 0, "lengths": [512], "options": options} | settings,
        "results": list(entries),
        "task_definition": {name: definition(name, 1, fields) for name, fields in options.items()},
        "generator": dict(GENERATOR),
    }


KEY = {"length": 512, "depth": 0.5}
WORSE, BETTER = [0] * 30 + [1] * 34, [1] * 60 + [0] * 4


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., list[str]]:
    def written(*files: dict[str, Any]) -> list[str]:
        paths = [tmp_path / f"{name}.json" for name in "abc"]
        for path, data in zip(paths, files, strict=False):
            path.write_text(json.dumps(data))
        return [str(path) for path in paths[: len(files)]]

    return written


def test_the_numbers_of_a_cell(write: Callable[..., list[str]]) -> None:
    comparison = compare_files(*write(result(entry("passkey", KEY, WORSE)), result(entry("passkey", KEY, BETTER))))
    (row,) = comparison["results"]
    assert (row["first"], row["second"], row["units"]) == (34 / 64, 60 / 64, 64)
    # Positions 0-29 are gained, 60-63 lost: P(at most 4 of 34 heads) * 2 = 2 * (1 + 34 + 561 + 5984 + 46376) / 2^34.
    assert (row["gained"], row["lost"], row["method"]) == (30, 4, "McNemar, exact")
    assert row["p"] == pytest.approx(2 * 52956 / 2**34, rel=1e-12)
    assert row["low"] < row["difference"] == 26 / 64 < row["high"]
    assert row["verdict"] == "better" and comparison["left_out"] == []


def test_the_other_way_round_is_worse_and_less_bits_are_better(write: Callable[..., list[str]]) -> None:
    a = result(entry("passkey", KEY, BETTER), bits(256, [110.0 + i for i in range(20)]))
    b = result(entry("passkey", KEY, WORSE), bits(256, [100.0 + i for i in range(20)]))
    verdicts = {row["task"]: row["verdict"] for row in compare_files(*write(a, b))["results"]}
    assert verdicts == {"passkey": "worse", "bits_per_byte": "better"}
    verdicts = {row["task"]: row["verdict"] for row in compare_files(*write(b, a))["results"]}
    assert verdicts == {"passkey": "better", "bits_per_byte": "worse"}


def test_the_correction_counts_every_cell_that_is_tested(write: Callable[..., list[str]]) -> None:
    # 6 gained and none lost: p = 2 / 64 is below 0.05 alone, and above it among ten cells.
    slight, base = [1] * 6 + [0] * 58, [0] * 64
    cells = [{"length": length, "depth": 0.5} for length in range(512, 522)]
    files = write(
        result(*(entry("passkey", cell, base) for cell in cells)),
        result(*(entry("passkey", cell, slight if index == 3 else base) for index, cell in enumerate(cells))),
    )
    rows = compare_files(*files)["results"]
    assert rows[3]["p"] == pytest.approx(2 / 64) and rows[3]["adjusted"] == pytest.approx(20 / 64)
    assert {row["verdict"] for row in rows} == {"no clear change"}
    assert [row["adjusted"] for row in rows] == holm([row["p"] for row in rows])
    alone = [json.loads(Path(file).read_text()) for file in files]
    for data in alone:
        data["results"] = data["results"][3:4]
    assert compare_files(*write(*alone))["results"][0]["verdict"] == "better"


def test_what_one_file_lacks_is_left_out_and_said(write: Callable[..., list[str]]) -> None:
    other = {"length": 1024, "depth": 0.5}
    diverged = bits(512, [1.0, 2.0]) | {"value": None}
    del diverged["outcomes"]
    perplexity = bits(256, [1.0, 2.0]) | {"metric": "perplexity"}
    del perplexity["outcomes"]
    a, b = write(
        result(entry("passkey", KEY, WORSE), entry("passkey", other, WORSE), bits(512, [1.0, 2.0]), perplexity),
        result(entry("passkey", KEY, BETTER), diverged, perplexity),
    )
    comparison = compare_files(a, b, metrics=["accuracy", "bits_per_byte", "perplexity"])
    assert len(comparison["results"]) == comparison["settings"]["tests"] == 1
    reasons = [item["reason"] for item in comparison["left_out"]]
    assert reasons == [f"not in {b}", f"diverged in {b}", f"no outcomes in {a}"]


def test_results_of_several_tasks_joined_are_compared_task_by_task(write: Callable[..., list[str]]) -> None:
    books = [entry("phonebook", {"pairs": 4, "distance": 0}, right) for right in (WORSE, BETTER)]
    text = bits(256, [1.0, 2.0]) | {"bytes": 200}
    options = {name: OPTIONS[name] for name in ("phonebook", "bits_per_byte")}
    first = [result(book, text, options=options, tasks=list(options)) for book in books]
    keys = {"options": {"passkey": OPTIONS["passkey"]}, "tasks": ["passkey"]}
    second = [result(entry("passkey", KEY, right[:32]), samples=32, lengths=[9], **keys) for right in (WORSE, BETTER)]
    pair = [joined(parts) for parts in zip(first, second, strict=True)]
    assert pair[0]["settings"]["by_task"] == {"passkey": {"lengths": [9], "samples": 32}}
    assert pair[0]["settings"]["tasks"] == ["phonebook", "bits_per_byte", "passkey"]
    assert pair[0]["task_definition"].keys() == pair[0]["settings"]["options"].keys() == OPTIONS.keys()
    assert pair[0]["summary"] == summarise(pair[0]["results"])
    comparison = compare_files(*write(*pair))
    assert len(comparison["results"]) == 3 and comparison["left_out"] == []
    # An evaluation of one of the tasks alone was asked the same.
    assert [row["task"] for row in compare_files(*write(pair[0], second[1]))["results"]] == ["passkey"]
    pair[1]["settings"]["by_task"]["passkey"]["samples"] = 33
    with pytest.raises(UserError, match=r"settings\.samples is 32 in the first and 33 in the second"):
        compare_files(*write(*pair))


def test_what_an_older_file_does_not_define_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's recorded files are of a version that wrote no definition of pass keys."""
    files = [str(RECORDED / name) for name in ("before.json", "after.json")]
    assert main(["compare", *files]) == 0
    table = capsys.readouterr().out
    assert table.count("phonebook") == 6 and table.count("  better") == 4
    (line,) = [line for line in table.splitlines() if line.startswith("left out")]
    assert line.startswith("left out: passkey accuracy, 9 cells: ") and line.endswith("run eval, or demo, again")
    assert main(["compare", *files, "--tasks", "passkey"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "no cell to compare" in line and "run eval, or demo, again" in line


def test_a_part_of_a_group_was_asked_as_the_group(write: Callable[..., list[str]]) -> None:
    options = {"lm_eval:sums": {"shots": None}}
    files = [
        result(entry("lm_eval:sums_easy", {}, right) | {"part_of": "lm_eval:sums"}, options=options)
        for right in (WORSE, BETTER)
    ]
    assert [row["task"] for row in compare_files(*write(*files))["results"]] == ["lm_eval:sums_easy"]
    del files[1]["results"][0]["part_of"]
    with pytest.raises(UserError, match=r"no task_definition\.lm_eval:sums_easy"):
        compare_files(*write(*files))


def test_tasks_and_metrics_narrow_what_is_tested(write: Callable[..., list[str]]) -> None:
    book = entry("phonebook", {"pairs": 4, "distance": 0}, [3, 4], 4)
    exact = entry("passkey", KEY, WORSE, metric="exact_match")
    files = write(*[result(entry("passkey", KEY, WORSE), exact, book)] * 2)
    assert len(compare_files(*files, metrics=["accuracy", "exact_match"])["results"]) == 3
    assert {row["metric"] for row in compare_files(*files)["results"]} == {"accuracy"}
    cost = {**exact, "metric": "perplexity", "outcomes": None}
    (row,) = compare_files(*write(*[result(cost, entry("passkey", KEY, WORSE))] * 2))["results"]
    assert row["metric"] == "accuracy", "the first that can be tested"
    files = write(*[result(entry("passkey", KEY, WORSE), exact, book)] * 2)
    assert [row["task"] for row in compare_files(*files, tasks=["phonebook"])["results"]] == ["phonebook"]
    assert len(compare_files(*files, metrics=["accuracy"])["results"]) == 2
    with pytest.raises(UserError, match=r'neither file has the task "phonebok"; .* Did you mean "phonebook"'):
        compare_files(*files, tasks=["phonebok"])
    with pytest.raises(UserError, match='neither file has the metric "f1"'):
        compare_files(*files, metrics=["f1"])


def changed(**parts: Any) -> dict[str, Any]:
    return result(entry("passkey", KEY, BETTER), bits(256, [1.0, 2.0])) | parts


def with_options(task: str, **fields: Any) -> dict[str, Any]:
    options = OPTIONS | {task: OPTIONS[task] | fields}
    return result(entry("passkey", KEY, BETTER), bits(256, [1.0, 2.0]), options=options)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (result(entry("passkey", KEY, BETTER), seed=1), "settings.seed is 0 in the first and 1 in the second"),
        (result(entry("passkey", KEY, BETTER), samples=32), "settings.samples is 64 in the first and 32 in the second"),
        (with_options("passkey", form="infinitebench"), 'settings.options.passkey.form is "statex" in the first'),
        (with_options("passkey", new=None, old=1), "settings.options.passkey.old is absent in the first and 1 in"),
        (changed(generator={"samples": "2"}), "generator is"),
        (changed(task_definition={"passkey": "0" * 64, "bits_per_byte": "0" * 64}), "task_definition.bits_per_byte is"),
        (changed(task_definition={}), "b.json has no task_definition.bits_per_byte"),
        (changed() | {"settings": changed()["settings"] | {"lengths": [512, 1024]}}, "leave bits_per_byte out"),
        (result(entry("passkey", KEY, BETTER[:63])), "64 in 64 sequences in the first and 63 in 63 in the second"),
        (result(entry("passkey", KEY, [2] * 64, asked=2)), "or their sizes differ"),
        (result(entry("passkey", {"length": 9, "depth": 0}, BETTER)), "no cell to compare (not in"),
        (result(), "b.json holds no outcomes of single examples"),
        (result(*[entry("passkey", KEY, BETTER)] * 2), "results[1] repeats accuracy of passkey"),
        (result(entry("passkey", KEY, BETTER) | {"outcomes": {}}), "its outcomes are damaged"),
        (changed(kind="training"), 'kind "training"'),
        (changed() | {"settings": changed()["settings"] | {"lengths": ["x"]}}, "b.json: settings.lengths is"),
        ({"log": []}, "b.json is not a result file: it has no schema; give a file that eval wrote"),
    ],
)
def test_files_that_cannot_be_compared_are_refused_with_the_key(
    write: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], other: dict[str, Any], words: str
) -> None:
    files = write(result(entry("passkey", KEY, WORSE), bits(256, [1.0, 2.0])), other)
    assert main(["compare", *files]) == 2
    error = capsys.readouterr().err
    expected = words.replace('kind "training"', "kind 'training'")
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["--alpha", "0"], ["--alpha", "1.5"], ["--tasks", "passkey,"], ["--out", "/dev/null/x"]]
)
def test_bad_options(write: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    files = write(*[result(entry("passkey", KEY, WORSE))] * 2)
    assert main(["compare", *files, *words]) == 2
    assert words[0].strip("-") in capsys.readouterr().err or words[0] == "--out"
    assert main(["compare", files[0], "/nowhere.json"]) == 2


def test_the_command_on_two_checkpoints(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words and more words, then others. " * 60)
    options = ["--tasks", "phonebook,passkey,bits_per_byte,copying", "--lengths", "128", "--pairs", "1,2", "--depths"]
    options += ["0.5", "--samples", "12", "--text", str(text), "--device", "cpu", "--dtype", "float32"]
    files = []
    for seed in (0, 1):
        model, out = tmp_path / f"model{seed}", tmp_path / f"{seed}.json"
        tiny_model(seed).save_pretrained(model)
        tokenizer.save_pretrained(model)
        assert main(["eval", str(model), *options, "--out", str(out)]) == 0
        files.append(str(out))
    capsys.readouterr()
    out = tmp_path / "deep" / "comparison.json"
    metrics = "accuracy,bits_per_byte,perplexity,character_accuracy"
    assert main(["compare", *files, "--metrics", metrics, "--out", str(out)]) == 0
    table = capsys.readouterr().out
    comparison = json.loads(out.read_text())
    assert comparison["kind"] == "comparison" and len(comparison["results"]) == table.count("length 128") + 2 + 1
    assert "left out: bits_per_byte perplexity, 1 cell: no outcomes in" in table

    data = [json.loads(Path(file).read_text()) for file in files]
    for file in data:
        assert all(e["low"] <= e["value"] <= e["high"] for e in file["results"]), "an interval on every score"
        assert file["summary_intervals"].keys() == file["summary"].keys()
        for name, (low, high) in file["summary_intervals"].items():
            assert low <= file["summary"][name] <= high
    for row in comparison["results"]:
        entries = [
            next(e for e in d["results"] if all(e[key] == row[key] for key in ("task", "cell", "metric"))) for d in data
        ]
        for name, found in zip(("first", "second"), entries, strict=True):
            # Outcomes are rounded to six decimals of numbers above 1.
            assert row[name] == pytest.approx(found["value"], rel=1e-6)
            assert unpack(found["outcomes"], "x").value == pytest.approx(found["value"], rel=1e-6)
    by_task = {row["task"]: row for row in comparison["results"] if row["metric"] != "accuracy"}
    # No window costs two random models the same.
    assert (
        by_task["bits_per_byte"]["gained"] + by_task["bits_per_byte"]["lost"] == by_task["bits_per_byte"]["units"] > 1
    )

    assert main(["compare", files[0], files[0], "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert {(row["p"], row["verdict"]) for row in same["results"]} == {(1.0, "no clear change")}
    assert main(["compare", files[0], files[0]]) == 0
    assert "both files are of the same checkpoint" in capsys.readouterr().out


def test_summaries_have_intervals(write: Callable[..., list[str]]) -> None:
    entries = [
        entry("passkey", {"length": length, "depth": 0.5}, BETTER) | {"low": 0.9, "high": 0.97} for length in (1, 2)
    ]
    entries += [
        entry("phonebook", {"pairs": p, "distance": 0}, BETTER) | {"low": low, "high": 0.99}
        for p, low in ((2, 0.91), (4, 0.8))
    ]
    ranges = [
        bits(start, list(np.linspace(100, 140, 30) * scale)) | {"bytes": 3000} for start, scale in ((1, 2), (2, 1))
    ]
    summary, intervals = summarise(entries + ranges), summary_intervals(entries + ranges)
    assert summary.keys() == intervals.keys()
    value, (low, high) = summary["passkey.accuracy"], intervals["passkey.accuracy"]
    # Two equal independent cells: their half-widths shrink by the square root of two.
    assert (low, high) == pytest.approx((value - (60 / 64 - 0.9) / 2**0.5, value + (0.97 - 60 / 64) / 2**0.5))
    assert (summary["phonebook.capacity"], intervals["phonebook.capacity"]) == (4, [2, 4])
    low, high = intervals["bits_per_byte"]
    # Windows are resampled whole: the standard error of 3 * linspace(100, 140) / 200 over 30 windows, times 1.96.
    half = 1.96 * np.linspace(100, 140, 30).std() * 3 / 200 / 30**0.5
    # 2000 resamples fix a quantile to about 5% of the half-width; 15% is three times that.
    assert (low, high) == pytest.approx((1.8 - half, 1.8 + half), abs=0.15 * half)
