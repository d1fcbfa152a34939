from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.report.inputs import read_inputs
from longrecall.report.page import build_report

ENTRY = {"task": "passkey", "metric": "accuracy", "count": 1, "value": 1.0, "low": 0.2, "high": 1.0}


def test_labels_come_from_the_option_then_the_file_then_its_name(synthetic: SimpleNamespace) -> None:
    a, b, c = synthetic.write(a=synthetic.evaluation(5), b=synthetic.evaluation(6, "own"), c=synthetic.training("run"))
    inputs = read_inputs([a, b, c])
    assert [entry.label for entry in inputs.evaluations] == ["a", "own"]
    assert [entry.label for entry in inputs.trainings] == ["run"]
    renamed = read_inputs([a, b, c], {"before": a, "after": b})
    assert [entry.label for entry in renamed.evaluations] == ["before", "after"]


def test_files_of_the_same_name_are_told_apart_by_their_folder(synthetic: SimpleNamespace) -> None:
    paths = []
    for name in ("one", "two"):
        folder = synthetic.folder / name
        folder.mkdir()
        (folder / "after.json").write_text(json.dumps(synthetic.evaluation(5)))
        paths.append(folder / "after.json")
    assert [entry.label for entry in read_inputs(paths).evaluations] == ["after", "two/after"]


def test_a_training_run_and_an_evaluation_may_share_a_label(synthetic: SimpleNamespace) -> None:
    inputs = read_inputs(synthetic.write(e=synthetic.evaluation(5, "x"), t=synthetic.training("x")))
    assert inputs.evaluations[0].label == inputs.trainings[0].label == "x"


def test_log_rows_without_a_loss_or_with_an_infinite_one_are_left_out(synthetic: SimpleNamespace) -> None:
    data = synthetic.training(steps=3)
    data["log"] += [{"step": 4, "event": "saved"}]
    (path,) = synthetic.write(t=data)
    text = Path(path).read_text().replace(str(data["log"][1]["loss"]), "Infinity", 1)
    Path(path).write_text(text)
    assert [row["step"] for row in read_inputs([path]).trainings[0].log] == [1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"schema": None}, "schema None is not 1"),
        ({"kind": "evaluaton"}, 'Did you mean "evaluation"'),
        ({"kind": None}, "kind None"),
        ({"results": None}, '"results" is missing'),
        ({"results": [3]}, r"results\[0\] is not an object"),
        ({"results": [{"task": "t", "cell": {}, "metric": "m", "count": 1, "value": "high"}]}, "value"),
        ({"results": [ENTRY | {"cell": {"length": 512}}]}, '"depth"'),
        ({"results": [ENTRY | {"cell": {"length": "512", "depth": 0}}]}, '"length"'),
        ({"checkpoint": []}, "checkpoint"),
    ],
)
def test_a_wrong_evaluation_is_refused_by_name(
    synthetic: SimpleNamespace, change: dict[str, Any], message: str
) -> None:
    (path,) = synthetic.write(wrong=synthetic.evaluation(5) | change)
    with pytest.raises(UserError, match=message) as caught:
        read_inputs([path])
    assert "wrong.json" in str(caught.value)


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("key", ["recipe", "settings", "environment", "checkpoint"])
def test_what_the_page_shows_as_it_stands_must_be_an_object(synthetic: SimpleNamespace, kind: str, key: str) -> None:
    (path,) = synthetic.write(
        wrong={**(synthetic.training() if kind == "training" else synthetic.evaluation(5)), key: 3}
    )
    with pytest.raises(UserError, match=rf'wrong.json: "{key}" is missing or not a dict; run (train|eval) again'):
        read_inputs([path])


@pytest.mark.parametrize(
    ("log", "message"),
    [(None, "log"), ("text", "log"), ([1], "log"), ([{"loss": 1.0}], '"step"'), ([{"step": 1, "loss": "x"}], '"loss"')],
)
def test_a_wrong_training_file_is_refused(synthetic: SimpleNamespace, log: Any, message: str) -> None:
    (path,) = synthetic.write(wrong=synthetic.training() | {"log": log})
    with pytest.raises(UserError, match=message):
        read_inputs([path])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"3"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.json"):
        read_inputs([path])


def test_what_is_asked_for_must_exist(synthetic: SimpleNamespace) -> None:
    a, b = synthetic.write(a=synthetic.evaluation(5), b=synthetic.evaluation(5))
    with pytest.raises(UserError, match="at least one result file"):
        read_inputs([])
    with pytest.raises(UserError, match=r"missing\.json"):
        read_inputs([synthetic.folder / "missing.json"])
    with pytest.raises(UserError, match="given twice"):
        read_inputs([a, a])
    with pytest.raises(UserError, match="not among the result files"):
        read_inputs([a], {"x": b})
    with pytest.raises(UserError, match="already has the label"):
        read_inputs([a], {"x": a, "y": a})


def test_two_files_with_one_label_are_refused(synthetic: SimpleNamespace) -> None:
    paths = synthetic.write(a=synthetic.evaluation(5, "same"), b=synthetic.evaluation(6, "same"))
    with pytest.raises(UserError, match='same label "same"'):
        read_inputs(paths)


def test_a_name_that_is_no_utf8_becomes_a_label_that_a_page_can_hold(synthetic: SimpleNamespace) -> None:
    path = synthetic.folder / os.fsdecode(b"b\xe4r.json")
    path.write_text(json.dumps(synthetic.evaluation(5)))
    assert [entry.label for entry in read_inputs([path]).evaluations] == ["b\N{REPLACEMENT CHARACTER}r"]
    build_report([path], synthetic.folder / "page.html")
    assert "b\N{REPLACEMENT CHARACTER}r.json" in (synthetic.folder / "page.html").read_text()
