"""Diagnoses, copying and stories on the page: values, marks, words, and files that are not what they should be."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.report import build_report
from longrecall.report.inputs import read_inputs
from tests.report.test_page import Page

PARTS = ("perplexity", "state", "remembrance", "recall", "verdict")


def page_of(synthetic: SimpleNamespace, **files: dict[str, Any]) -> Page:
    path = build_report(synthetic.write(**files), synthetic.folder / "r.html", force=True)
    return Page(path.read_text(encoding="utf-8"))


def sections(page: Page) -> list[str | None]:
    return [attributes["id"] for attributes in page.all("section")]


def plots(synthetic: SimpleNamespace) -> list[str]:
    text = (synthetic.folder / "r.html").read_text(encoding="utf-8")
    return re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)


def test_values_arrive_as_they_were_written(synthetic: SimpleNamespace) -> None:
    data = synthetic.diagnosis(0.0, "ill")
    data["perplexity"][2] |= {"loss": None, "low": None, "high": None, "bits_per_byte": None}
    (entry,) = read_inputs(synthetic.write(d=data)).diagnoses
    assert (entry.label, entry.training_length, entry.remembrance_length) == ("ill", 512, 8192)
    assert [(span.start, span.end) for span in entry.losses[:2]] == [(0, 64), (64, 128)]
    assert [span.loss.place for span in entry.losses[:2]] == [32.0, pytest.approx(90.51, abs=0.01)]
    assert entry.losses[2].loss.value is None and entry.losses[3].loss.value == data["perplexity"][3]["loss"]
    assert entry.layers[1].ceiling == 16 and len(entry.layers[1].heads["std"]) == 2
    assert [point.place for point in entry.remembrance] == [point["t"] for point in data["remembrance"]["points"]]
    assert dict(entry.maximum) == {"0.5": 700, "0.8": None}
    assert dict(entry.maximum_intervals) == {"0.5": (512, 1024), "0.8": (None, 700)}
    assert [finding.name for finding in entry.verdict] == ["length"]


def test_before_and_after_share_every_plot(synthetic: SimpleNamespace) -> None:
    page = page_of(synthetic, b=synthetic.diagnosis(0.0, "before"), a=synthetic.diagnosis(1.0, "after"))
    parts = ["verdict", "perplexity", "state", "remembrance", "recall", "sizes", "provenance"]
    assert sections(page) == parts
    assert len(page.all("svg")) == 6
    assert all("before" in plot and "after" in plot for plot in plots(synthetic))
    readings = [text for text in page.text["span"] if text.startswith("How to read it: ")]
    assert len(readings) == 6 and all(text.count(". ") <= 1 for text in readings)
    assert "perplexity rises above its 512-token level at 700" in page.text["dd"]
    # How far recall reaches after the change: 700, anything from 512 to 1,024.
    assert any("512 to 1,024" in " ".join(text.split()) for texts in page.text.values() for text in texts)
    assert any(text.startswith("What to do: post-train") for text in page.text["span"])
    assert {"length", "healthy"} == set(page.text["dt"])


def test_the_training_length_is_marked(synthetic: SimpleNamespace) -> None:
    page_of(synthetic, d=synthetic.diagnosis(0.5))
    perplexity, *_, remembrance, recall = plots(synthetic)
    assert "trained on 512" in perplexity and "trained on 512" in recall and "last 512 kept" in remembrance


@pytest.mark.parametrize("part", PARTS)
def test_each_part_may_be_absent_and_may_stand_alone(
    synthetic: SimpleNamespace, part: str, request: pytest.FixtureRequest
) -> None:
    whole = synthetic.diagnosis(0.0)
    alone = {key: value for key, value in whole.items() if key not in PARTS or key == part}
    assert sections(page_of(synthetic, alone=alone)) == [part, "sizes", "provenance"]
    # No plot is made of two parts: those of the others are drawn where they stand alone.
    request.getfixturevalue("undrawn")
    without = {key: value for key, value in whole.items() if key != part}
    assert part not in sections(page_of(synthetic, without=without))


def test_parts_that_were_not_run_may_be_empty(synthetic: SimpleNamespace) -> None:
    empty: dict[str, Any] = {"perplexity": [], "state": {"positions": [], "layers": []}, "verdict": []}
    empty |= {"remembrance": {"length": 8192, "points": []}, "recall": {"points": [], "maximum": {}}}
    page = page_of(synthetic, d=synthetic.diagnosis(0.0) | empty)
    assert sections(page) == ["sizes", "provenance"]


def test_nothing_known_breaks_no_plot(synthetic: SimpleNamespace) -> None:
    data = synthetic.diagnosis(0.0)
    for row in data["perplexity"]:
        row.update(loss=None, low=None, high=None, bits_per_byte=None)
    for part in ("remembrance", "recall"):
        for row in data[part]["points"]:
            row.update(value=None, low=None, high=None)
    for layer in data["state"]["layers"]:
        for head in layer["heads"]:
            head.update({name: [None] * 10 for name in ("mean", "std", "norm", "effective_rank")})
    assert "–" in page_of(synthetic, d=data).text["td"]


def test_a_state_that_is_zero_at_first_has_a_plot(synthetic: SimpleNamespace) -> None:
    data = synthetic.diagnosis(0.0)
    for head in data["state"]["layers"][0]["heads"]:
        head["std"][0] = head["norm"][0] = 0.0
    assert len(page_of(synthetic, d=data).all("svg")) == 6


def test_a_state_of_other_positions_and_many_layers(synthetic: SimpleNamespace) -> None:
    deep, other = synthetic.diagnosis(0.0, layers=30, heads=1), synthetic.diagnosis(1.0, layers=5)
    other["state"]["positions"] = [place + 3 for place in other["state"]["positions"]]
    page = page_of(synthetic, deep=deep, other=other)
    drawn = [text for text in page.text["text"] if text.startswith("layer ")]
    assert len(drawn) == 3 * 12 and {"layer 0 mamba2", "layer 29 mamba2"} <= set(drawn)
    assert any("12 of 30 layers are drawn" in text for text in page.text["figcaption"])
    assert {f"layer {number}" for number in range(30)} <= set(page.text["th"])


def test_one_label_looks_the_same_everywhere(synthetic: SimpleNamespace) -> None:
    files = {"e": synthetic.evaluation(9, "before"), "f": synthetic.evaluation(30, "after")}
    inputs = read_inputs(synthetic.write(**files, d=synthetic.diagnosis(1.0, "after"), t=synthetic.training("after")))
    assert inputs.labels == ["before", "after"]
    page_of(synthetic, **files, d=synthetic.diagnosis(1.0, "after"))
    recall = plots(synthetic)[-1]
    assert "var(--s1)" in recall and "var(--s0)" not in recall  # the second colour, not the first


def test_copying_and_stories(synthetic: SimpleNamespace) -> None:
    page = page_of(synthetic, before=synthetic.lengths(15), after=synthetic.lengths(70))
    assert sections(page) == ["in-words", "headline", "slopes", "copying", "babilong", "sizes", "provenance"]
    _, copying, stories = plots(synthetic)
    assert copying.count("trained to 20") == 2 and stories.count("trained on 512") == 2
    assert {"stories: accuracy, all cells", "copying: strings of 160 letters"} <= set(page.text["th"])
    labels = re.findall(r'y="([\d.]+)"[^>]*>(qa\d)<', stories)
    heights = [float(height) for height, _ in sorted(labels, key=lambda label: label[1])]
    # Downwards from qa1 on the left map, whatever the number of maps that share the axis.
    assert len(heights) == 5 and heights == sorted(heights)


def test_the_recipe_of_a_run_says_what_was_trained(synthetic: SimpleNamespace) -> None:
    run = synthetic.training("after")
    run["recipe"]["data"] = {"sources": [{"kind": "text", "path": "x"}, {"kind": "copying", "lengths": [5, 33]}]}
    page_of(synthetic, after=synthetic.lengths(70, trained=None), run=run)
    assert "trained to 33" in plots(synthetic)[0]
    page_of(synthetic, other=synthetic.lengths(70, trained=None), run=run)
    assert "trained to" not in plots(synthetic)[0]


@pytest.mark.usefixtures("undrawn")
def test_the_command_takes_diagnoses(synthetic: SimpleNamespace) -> None:
    paths = synthetic.write(b=synthetic.diagnosis(0.0), a=synthetic.diagnosis(1.0))
    out = synthetic.folder / "page.html"
    assert main(["report", *paths, "-o", str(out), "--label", f"before={paths[0]}"]) == 0
    assert "before" in Page(out.read_text(encoding="utf-8")).text["h3"]


def drop(*keys: str | int) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


def put(value: Any, *keys: str | int) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(2, "schema"), "schema 2 is not 1"),
        (put("diagnose", "kind"), 'Did you mean "diagnosis"'),
        (drop("settings"), "settings is missing"),
        (drop("checkpoint"), "checkpoint is missing"),
        (drop("settings", "training_length"), "settings.training_length is missing"),
        (put(0, "settings", "training_length"), "settings.training_length"),
        (put("512", "settings", "training_length"), "settings.training_length"),
        (drop("perplexity", 3, "loss"), "perplexity[3].loss is missing"),
        (drop("perplexity", 3, "bits_per_byte"), "perplexity[3].bits_per_byte is missing"),
        (put("high", "perplexity", 3, "high"), "perplexity[3].high"),
        (put(7, "perplexity", 3), "perplexity[3] is missing"),
        (put(64, "perplexity", 0, "start"), "perplexity[0].end"),
        (put({}, "perplexity"), "perplexity is missing or not"),
        (drop("state", "positions"), "state.positions is missing"),
        (put(None, "state", "positions", 0), "state.positions is missing"),
        (drop("state", "layers", 1, "heads"), "state.layers[1].heads is missing"),
        (drop("state", "layers", 1, "key_dim"), "state.layers[1].key_dim is missing"),
        (drop("state", "layers", 0, "heads", 1, "norm"), "state.layers[0].heads[1].norm is missing"),
        (drop("state", "layers", 0, "heads", 1, "norm", 0), "heads[1].norm has 9 values for 10 positions"),
        (drop("remembrance", "length"), "remembrance.length is missing"),
        (drop("remembrance", "points"), "remembrance.points is missing"),
        (drop("remembrance", "points", 0, "t"), "remembrance.points[0].t is missing"),
        (drop("recall", "points", 4, "count"), "recall.points[4].count is missing"),
        (put([1], "recall", "maximum"), "recall.maximum"),
        (put("far", "recall", "maximum", "0.5"), "recall.maximum.0.5"),
        (put([3], "recall", "maximum_intervals", "0.5"), "recall.maximum_intervals"),
        (put([3, "far"], "recall", "maximum_intervals", "0.5"), "recall.maximum_intervals.0.5"),
        (drop("verdict", 0, "text"), "verdict[0].text is missing"),
    ],
)
def test_a_wrong_diagnosis_is_refused_by_name(
    synthetic: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    data = copy.deepcopy(synthetic.diagnosis(0.0))
    change(data)
    (path,) = synthetic.write(wrong=data)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_inputs([path])
    assert "wrong.json" in str(caught.value) and "\n" not in str(caught.value)
    assert main(["report", path, "-o", str(synthetic.folder / "r.html")]) == 2
    assert "wrong.json" in capsys.readouterr().err and not (synthetic.folder / "r.html").exists()


@pytest.mark.parametrize("cell", [{"length": 512}, {"task": "qa1"}, {"task": 1, "length": 512}])
def test_a_wrong_cell_of_stories_is_refused(synthetic: SimpleNamespace, cell: dict[str, Any], tmp_path: Path) -> None:
    data = synthetic.lengths(15)
    data["results"][-1]["cell"] = cell
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"results\[\d+\] has no (number|name)"):
        read_inputs([path])
