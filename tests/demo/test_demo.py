"""The demo's parts fast, and the whole of it (marked slow) with a handful of steps."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import longrecall
from longrecall.cli.main import main
from longrecall.demo import job
from longrecall.demo.job import MARKER, _prepare, run_demo
from longrecall.demo.processes import Process, wait_for
from longrecall.demo.table import closing_table, verdict
from longrecall.errors import UserError
from longrecall.outputs import claim_folder

RECORDED = Path(__file__).parents[2] / "experiments" / "results" / "demo"


def result(values: dict[int, float], width: float = 0.02) -> dict[str, Any]:
    cells = [
        {
            "task": "phonebook",
            "cell": {"pairs": pairs, "distance": 0},
            "metric": "accuracy",
            "value": value,
            "low": value - width,
            "high": value + width,
            "count": 1024,
        }
        for pairs, value in values.items()
    ]
    settings = {"samples": 1024, "seed": 0, "lengths": [512], "options": {}}
    return {"results": cells, "checkpoint": {"state_size": 7680}, "settings": settings, "summary": {}}


def test_verdict_names_the_largest_gain_over_both_others() -> None:
    before, control = result({2: 0.9, 8: 0.6, 16: 0.4}), result({2: 0.9, 8: 0.62, 16: 0.42})
    after = result({2: 0.91, 8: 0.75, 16: 0.7})
    text = verdict(before, after, control)
    assert "better in 2 of 3 settings, most among 16 pairs (40.0% to 70.0%)" in text
    assert "most among 16 pairs (42.0% to 70.0%)" in text


def test_verdict_admits_when_there_is_no_gain() -> None:
    before = result({8: 0.6})
    assert verdict(before, result({8: 0.61}), result({8: 0.6})).count("Cannot tell: phone book.") == 2
    # A gain over the start that plain training reaches too is no gain of the state.
    text = verdict(before, result({8: 0.9}), result({8: 0.9}))
    assert text.count("Better: phone book.") == 1 and "surgery. Cannot tell: phone book." in text


def test_table_shows_every_cell_and_survives_a_diverged_one() -> None:
    before = result({8: 0.6})
    after = copy.deepcopy(before)
    before["results"].append(before["results"][0] | {"task": "bits_per_byte", "metric": "perplexity"})
    after["results"][0] |= {"value": None, "low": None, "high": None}
    table = closing_table(before, after, before)
    assert "phone book among 8 pairs" in table and "diverged" in table and "1,024" in table
    assert "perplexity" not in table


def test_its_files_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"PAIRS": (1,), "LENGTHS": (512,), "WINDOWS": 2, "KEY_LENGTHS": (256,), "KEYS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(job, name, value)
    assets = Path(longrecall.__file__).parent / "assets"
    result = job._measure(assets / "mamba2-base", tmp_path / "before.json", "A fox ran by. " * 100, 2)
    assert result == json.loads((tmp_path / "before.json").read_text())
    tasks = ["phonebook", "bits_per_byte", "passkey"]
    assert result["settings"]["tasks"] == list(result["task_definition"]) == tasks
    assert list(result["settings"]["options"]) == tasks
    assert result["summary"].keys() == result["summary_intervals"].keys()
    assert main(["compare", str(tmp_path / "before.json"), str(tmp_path / "before.json")]) == 0
    table = capsys.readouterr().out
    assert all(task in table for task in tasks) and "left out" not in table


def test_help_says_what_it_costs_and_how_many_steps_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "about five minutes on two CPU cores" in text and "no GPU and no network" in text
    recipe = yaml.safe_load((Path(longrecall.__file__).parent / "assets" / "demo" / "recipe.yaml").read_text())
    assert f"training steps of each of the two runs; fewer are quicker and show less [{recipe['run']['steps']}]" in text


def test_only_a_demo_that_was_interrupted_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and no demo wrote it"):
        _prepare(tmp_path / "mine", force=False)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    _prepare(tmp_path / "new", force=False)
    for name in ("before.json", ".after.json.0123456789abcdef.tmp", "notes.txt"):
        (tmp_path / "new" / name).write_text("{}")
    (tmp_path / "new" / "work" / "enlarged").mkdir(parents=True)
    _prepare(tmp_path / "new", force=False)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [MARKER, "notes.txt"]
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2


@pytest.mark.parametrize("marker", ['{"seconds": 9.5, "steps": 400, "samples": 1024}', "{damaged"])
def test_a_finished_demo_is_replaced_with_force_only(tmp_path: Path, marker: str) -> None:
    (tmp_path / MARKER).write_text(marker)
    (tmp_path / "report.html").write_text("minutes of work")
    with pytest.raises(UserError, match="holds a finished demo; --force replaces it by a new one, or choose another"):
        run_demo(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARKER, "report.html"]
    _prepare(tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_children_of_a_killed_demo_are_waited_for(tmp_path: Path) -> None:
    _prepare(tmp_path, force=False)
    told: list[str] = []

    def again() -> None:  # another thread is as good as another process
        with pytest.raises(UserError) as caught:
            run_demo(tmp_path, force=True)
        told.append(str(caught.value))

    for folder in (tmp_path / "work" / "enlarged", tmp_path):
        with claim_folder(folder, "advice"):
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
        assert f"{folder} is being written by another thread" in told.pop()
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARKER, "work"]


def test_force_never_replaces_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--force does not replace it"):
        _prepare(Path("."), force=True)
    assert (tmp_path / "thesis.tex").exists()


def test_missing_packages_of_the_report_are_found_before_anything_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (tmp_path / MARKER).write_text("{}")
    (tmp_path / "before.json").write_text("{}")
    with pytest.raises(UserError, match="a report needs jinja2"):
        run_demo(tmp_path)
    assert (tmp_path / "before.json").exists()


def test_a_failing_child_ends_the_others_and_shows_its_last_words(tmp_path: Path) -> None:
    sleeper = Process("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    failing = Process("failing", [sys.executable, "-c", "import sys; sys.exit('no luck')"], tmp_path)
    with pytest.raises(UserError, match="the step failing ended with code 1: no luck"):
        wait_for([sleeper, failing])
    assert not sleeper.alive


def test_json_tells_what_a_demo_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def recorded(out: Path, **_: object) -> str:
        for name in ("before", "after", "control"):
            shutil.copy(RECORDED / f"{name}.json", out / f"{name}.json")
        (out / MARKER).write_text('{"seconds": 9.5, "steps": 400, "samples": 1024}')
        return "the table"

    monkeypatch.setattr("longrecall.demo.job.run_demo", recorded)
    assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["samples"], facts["seconds"]) == (400, 1024, 9.5)
    assert facts["checkpoint"] == str(tmp_path / "checkpoint") and facts["report"] == str(tmp_path / "report.html")
    capacity = {name: summary["phonebook.capacity"] for name, summary in facts["summaries"].items()}
    assert capacity == {"before": 4, "after": 8, "control": 4}
    assert "24 pairs" in facts["verdict"]
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the table\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = run_demo(tmp_path / "demo", steps=3, samples=8)
    made = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"checkpoint", "before.json", "after.json", "control.json", "report.html"} <= made
    assert "work" not in made
    before = json.loads((tmp_path / "demo" / "before.json").read_text())
    after = json.loads((tmp_path / "demo" / "after.json").read_text())
    assert after["checkpoint"]["state_size"] == 4 * before["checkpoint"]["state_size"]
    assert "phone book among 8 pairs" in table
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "control" in page and "http" not in page.split("<body")[1].split("<svg")[0]
    files = [str(tmp_path / "demo" / f"{name}.json") for name in ("before", "after", "control")]
    for other in files[1:]:
        assert main(["compare", files[0], other]) == 0
        assert "left out" not in capsys.readouterr().out
    assert longrecall.load(tmp_path / "demo" / "checkpoint").state_size() == after["checkpoint"]["state_size"]
