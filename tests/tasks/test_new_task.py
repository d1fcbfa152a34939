"""A new task is one file and one registry line: tried with one that nobody ships."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import longrecall
from longrecall import RecurrentConfig, RecurrentLM
from longrecall.cli.main import main
from longrecall.evaluation.harness import include_path
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.report import overview_sections
from longrecall.report.inputs import read_inputs
from longrecall.tasks import registry

SOURCE = '''
"""Backwards: say a string of letters from its end.

    input   a b c > c b a
    label   . . . . c b a
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from longrecall.tasks.charts import LineChart, MeanChart, PanelChart, RangeChart, ShareMap, TaskSection, TrainedTo
from longrecall.tasks.declaration import (
    Capacity,
    Declaration,
    Flag,
    HarnessForm,
    Headline,
    ReportPart,
    TrainingSource,
)
from longrecall.tasks.encoding import IGNORE, Sample, sample_generator
from longrecall.tasks.wording import Wording


def backwards(generator, encode, letters, length=None):
    """One string and its reverse; repeated up to `length` tokens for training."""
    ids, labels = [], []
    while not ids or (length is not None and len(ids) < length):
        text = "".join("abcdefgh"[i] for i in generator.integers(0, 8, letters))
        asked, answer = list(encode(text + ">")), list(encode(text[::-1]))
        ids += asked + answer
        labels += [IGNORE] * len(asked) + answer
    return np.array(ids[:length], dtype=np.int64), np.array(labels[:length], dtype=np.int64)


@dataclass(frozen=True)
class BackwardsSource(TrainingSource):
    kind: ClassVar[str] = "backwards"
    lengths: tuple[int, int] = (2, 5)
    weight: float = 1.0

    def sequences(self, pieces):
        low, high = self.lengths
        return lambda generator, length: backwards(generator, pieces, int(generator.integers(low, high + 1)), length)


def _text(name):
    return {"name": name, "title": name, "caption": f"caption of {name}", "reading": f"reading of {name}"}


CHARTS = (
    LineChart(
        along="length",
        title="Backwards: share right by length",
        axis="letters of the string",
        share="share right",
        caption="Share of strings that are said from their end.",
        reading="How to read it: higher is better.",
        metrics={"accuracy": "whole strings"},
        trained=TrainedTo("trained", "lengths", "How to read it: the mark is the end of training."),
    ),
    PanelChart(
        along="length",
        axis="letters",
        share="right",
        panels="repeats",
        panel_title="{:g} times".format,
        **_text("panels"),
    ),
    MeanChart(along="length", axis="letters", share="right", table="means by length", **_text("means")),
    ShareMap(
        along="length",
        rows="repeats",
        axes=("letters", "times"),
        keys=("length", "repeats"),
        trained=True,
        **_text("map"),
    ),
    RangeChart(axis="range", quantity="amount", metric="accuracy", ends=("repeats", "length"), **_text("ranges")),
)


@dataclass(frozen=True)
class Backwards:
    repeats: tuple[int, ...] = (1,)
    trained: int | None = None

    name: ClassVar[str] = "backwards"
    wording: ClassVar[Wording] = Wording("backwards", "The model must say a string of letters from its end.")
    declared: ClassVar[Declaration] = Declaration(
        flags=(
            Flag("--repeats", "repeats", "N,...", "how often the string stands there"),
            Flag("--backwards-trained", "trained", "N", "longest string of training"),
        ),
        length_unit="letters",
        source=BackwardsSource,
        capacity=Capacity("length", apart="repeats", words="letters said from their end"),
        harness=HarnessForm(7, until=("<",), metrics=("accuracy", "contains")),
        report=ReportPart(
            ("accuracy",),
            ("length", "repeats"),
            headlines=lambda cells: [Headline(f"backwards: all of {len(cells)} cells")],
            section=TaskSection("Backwards by length", CHARTS, anchor="from-the-end"),
        ),
    )

    def cells(self, lengths):
        return [{"length": length, "repeats": repeats} for length in lengths for repeats in self.repeats]

    def answers_per_sample(self, cell):
        return 1

    def sample(self, encode, cell, index, seed):
        return Sample(*backwards(sample_generator(seed, self.name, cell, index), encode, int(cell["length"])))
'''


@pytest.fixture
def backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with its line in the registry."""
    package = tmp_path / "somebodys_tasks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "backwards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("somebodys_tasks.backwards")
    before = dict(registry._TASKS), dict(registry.TRAINING_SOURCES)
    registry.register(module.Backwards)
    yield module
    for table, kept in ((registry._TASKS, before[0]), (registry.TRAINING_SOURCES, before[1])):
        table.clear()
        table.update(kept)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model and its tokenizer, saved."""
    layers = [{"mixer": {"type": "gla", "num_heads": 1, "key_dim": 4, "value_dim": 4}}]
    RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=8, layers=layers)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_help_shows_it_with_its_flags(backwards: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ", backwards and lm_eval:NAME" in text and "for backwards in letters" in text
    assert "--repeats N,... how often the string stands there [1]" in text
    assert "--backwards-trained N longest string of training" in text


def test_it_is_measured_and_reported(
    backwards: ModuleType, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(checkpoint), "--tasks", "backwards", "--lengths", "2,4", "--samples", "3", "--device", "cpu"]
    out = ["--out", str(tmp_path / "result.json")]
    assert main([*words, "--repeats", "1,2", "--option", "backwards.trained=3", *out]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [entry["cell"] for entry in result["results"]] == [
        {"length": length, "repeats": repeats} for length in (2, 4) for repeats in (1, 2)
    ]
    assert result["settings"]["options"]["backwards"] == {"repeats": [1, 2], "trained": 3}
    # Apart for each number of repeats; the first one's has the bare name.
    assert {"backwards.accuracy", "backwards.capacity", "backwards.capacity.repeats=2"} <= result["summary"].keys()
    assert main(["report", str(tmp_path / "result.json"), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    for words_of_it in (
        "Backwards by length",
        "The model must say a string of letters from its end.",
        "backwards: all of 4 cells",
        "Share of strings that are said from their end.",
        "the mark is the end of training",
        "trained to 3",
        'id="from-the-end-heading"',
        *(f"{part} of {name}" for part in ("caption", "reading") for name in ("panels", "means", "map", "ranges")),
        "2 times",
        "means by length",
    ):
        assert words_of_it in page
    assert "More measurements" not in page  # its numbers stand in its own section
    other = json.loads((tmp_path / "result.json").read_text())
    other["checkpoint"]["state_size"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(other))
    both = read_inputs([tmp_path / "result.json", tmp_path / "other.json"]).evaluations
    assert overview_sections._reach(both).keys() == {"letters said from their end"}
    broken = json.loads((tmp_path / "result.json").read_text())
    del broken["results"][0]["cell"]["repeats"]
    (tmp_path / "result.json").write_text(json.dumps(broken))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "result.json"), "--out", str(tmp_path / "second.html")]) == 2
    assert 'results[0] has no number "repeats"' in capsys.readouterr().err


def test_a_recipe_trains_on_it(
    backwards: ModuleType, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "model": {"checkpoint": str(checkpoint)},
        "data": {"sources": [{"kind": "backwards", "lengths": [2, 3]}], "context_length": 32},
        "run": {"output": str(tmp_path / "out"), "steps": 2, "batch_size": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    written = json.loads((tmp_path / "out" / "training.json").read_text())
    assert written["recipe"]["data"]["sources"][0] == {"kind": "backwards", "lengths": [2, 3], "weight": 1.0}
    recipe["data"] = {"sources": [{"kind": "backward"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    capsys.readouterr()
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 2
    assert 'Did you mean "backwards"' in capsys.readouterr().err


def test_lm_evaluation_harness_knows_it(
    backwards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its YAML is written with the others, into a folder that stays; a broken folder is written anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["eval", "--harness-path"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert tmp_path / "cache" in folder.parents and folder == include_path()
    text = (folder / "longrecall_backwards.yaml").read_text()
    assert 'until: ["<"]\n  max_gen_toks: 7\n' in text and "longrecall_task: backwards" in text
    assert [line.split()[-1] for line in text.splitlines() if "- metric:" in line] == ["accuracy", "contains"]
    (folder / "longrecall_backwards.yaml").write_text("task: something else")
    assert include_path() == folder and (folder / "longrecall_backwards.yaml").read_text() == text
    assert [place.name for place in folder.parent.iterdir()] == [folder.name]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert (include_path() / "longrecall_backwards.yaml").read_text() == text


METRICS = {"bits_per_byte": {"position_loss.py", "comparison.py", "diagnoses.py"}}
"""A task with the name of its metric -> files that name the metric."""


@pytest.mark.parametrize("package", ["report", "evaluation"])
def test_no_report_and_no_evaluation_knows_a_task_by_name(package: str) -> None:
    names = set(registry.task_names())
    for path in (Path(longrecall.__file__).parent / package).rglob("*.py"):
        found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)} & names
        assert all(path.name in METRICS.get(name, ()) for name in found), f"{path} names {found}"


def test_taken_names_flags_and_sources_are_refused(backwards: ModuleType) -> None:
    with pytest.raises(ValueError, match="registered twice"):
        registry.register(backwards.Backwards)
    flags = backwards.Declaration(flags=(backwards.Flag("--pairs", "repeats", "N", "pairs"),))
    with pytest.raises(ValueError, match="declares --pairs, which 'phonebook' has already"):
        registry.register(type("Other", (backwards.Backwards,), {"name": "other", "declared": flags}))
    source = backwards.Declaration(source=backwards.BackwardsSource)
    with pytest.raises(ValueError, match="training source 'backwards' is registered twice"):
        registry.register(type("Other", (backwards.Backwards,), {"name": "other", "declared": source}))
    assert "other" not in registry.task_names()
