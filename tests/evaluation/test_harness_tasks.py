"""Our tasks inside lm-evaluation-harness, its command with our checkpoints, its numbers as our entries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longrecall.evaluation import evaluate
from longrecall.evaluation.harness import include_path
from tests.evaluation.conftest import tiny_model
from tests.evaluation.test_questions import Speaker

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
# Of the packages that lm_eval brings, not of ours.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of tasks is written into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def looks_up(text: str) -> str:
    """Reads the phone book, but knows only names up to m."""
    asked = re.search(r"\?([a-z]+) (\d*)$", text)
    found = asked and re.search(rf"^{asked[1]} (\d+)$", text, flags=re.MULTILINE)
    if not asked or not found or asked[1] > "m":
        return "x"
    return found[1][len(asked[2]) :] or "\n"


def test_our_tasks_in_the_harness_score_as_here(tokenizer: Any) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from longrecall.evaluation.harness.language_model import LongrecallLM

    settings: dict[str, Any] = {"pairs": (6,), "letters": 1, "digits": 2, "opening": False}
    metadata = {"lengths": [128], "samples": 60, "options": settings | {"pairs": [6]}}
    manager = TaskManager(include_path=str(include_path()), include_defaults=False, metadata=metadata)
    lm = LongrecallLM(Speaker(looks_up), tokenizer=tokenizer)
    found = lm_eval.simple_evaluate(lm, tasks=["longrecall_phonebook"], task_manager=manager)["results"]
    options = {"phonebook": settings}
    ours = evaluate(Speaker(looks_up), tokenizer, ["phonebook"], [128], 60, options=options, progress=False)
    accuracy = ours["results"][0]["value"]
    assert 0.2 < accuracy < 0.8
    assert found["longrecall_phonebook"]["accuracy,none"] == pytest.approx(accuracy, abs=1e-12)


def test_the_command_adds_our_tasks() -> None:
    from longrecall.evaluation.harness.__main__ import with_tasks

    path = str(include_path())
    assert with_tasks(["run", "--tasks", "x"])[-2:] == ["--include_path", path]
    assert with_tasks(["--model", "longrecall"])[-1] == path
    for arguments in ([], ["--help"], ["run", "--include_path", "mine"], ["run", "--include_path=mine"]):
        assert with_tasks(arguments) == arguments


@pytest.mark.slow  # The harness indexes 14 000 files of tasks first.
@pytest.mark.parametrize("model", ["longrecall", "hf"])
def test_the_command_itself(model: str, tokenizer: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "tiny"
    tiny_model().save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    metadata = json.dumps({"lengths": [128], "samples": 6, "options": {"pairs": [2]}})
    command = [sys.executable, "-m", "longrecall.evaluation.harness", "run", "--model", model]
    command += ["--model_args", f"pretrained={checkpoint}", "--tasks", "longrecall_phonebook", "--metadata", metadata]
    done = subprocess.run([*command, "--output_path", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("*.json")
    assert "accuracy,none" in json.loads(written.read_text())["results"]["longrecall_phonebook"]


@pytest.mark.parametrize("name", ["phonebook", "passkey", "copying", "babilong", "niah_single_1", "niah_multivalue"])
def test_an_oracle_scores_one_on_our_documents(name: str) -> None:
    from longrecall.evaluation.harness.generators import make_documents, score_document

    lengths = [16] if name == "copying" else [2048]
    documents = make_documents(longrecall_task=name, lengths=lengths, samples=6, seed=5)["test"]
    assert len(documents) >= 6
    for document in documents:
        scores = score_document(document, [document["target"] + "\n"])
        assert scores["accuracy"] == 1.0
        assert score_document(document, ["\x00"])["accuracy"] == 0.0
        if name in ("phonebook", "passkey", "copying"):
            # The answer must be the next thing said.
            assert score_document(document, ["so: " + document["target"]])["accuracy"] == 0.0
        assert document["target"] not in document["prompt"][-len(document["target"]) :]
    again = make_documents(longrecall_task=name, lengths=lengths, samples=6, seed=5)["test"]
    assert again.to_list() == documents.to_list()


def test_every_file_of_tasks_loads() -> None:
    from lm_eval.tasks import TaskManager

    settings = {"lengths": [2048], "samples": 2}
    manager = TaskManager(include_path=str(include_path()), include_defaults=False, metadata=settings)
    names = [path.stem for path in include_path().glob("*.yaml")]
    assert len(names) == 12 and sorted(names) == sorted(manager.all_subtasks)
    # Copying counts letters: 2048 of them are slow to draw for nothing.
    loaded = manager.load([name for name in names if name != "longrecall_copying"])["tasks"]
    assert all(len(task.test_docs()) >= 2 for task in loaded.values())


def test_ruler_lengths_become_cells() -> None:
    from longrecall.evaluation.harness.entries import result_entries

    def sample(length: str, score: float) -> dict[str, Any]:
        return {"filter": "none", "4096": -1.0, "8192": -1.0} | {length: score}

    found = {
        "results": {"niah": {"alias": "niah", "sample_len": 3, "4096,none": 0.5, "8192,none": 1.0, "512,none": -1}},
        "samples": {"niah": [sample("4096", 0.0), sample("4096", 1.0), sample("8192", 1.0)]},
        "versions": {"niah": 1.0},
        "n-samples": {"niah": {"original": 3, "effective": 3}},
    }
    first, second = result_entries(found)
    assert (first["cell"], first["metric"], first["value"], first["count"]) == ({"length": 4096}, "contains", 0.5, 2)
    assert (second["cell"], second["value"], second["count"]) == ({"length": 8192}, 1.0, 1)


def test_standard_errors_become_intervals() -> None:
    from longrecall.evaluation.harness.entries import result_entries

    numbers = {"sample_len": 2, "f1,strict": 0.5, "f1_stderr,strict": 0.1, "f1,none": 0.5, "f1_stderr,none": "N/A"}
    found = {"results": {"t": numbers}, "samples": {}, "versions": {"t": 1}, "n-samples": {}}
    strict, plain = result_entries(found)
    assert strict["metric"] == "f1 (strict)" and plain["metric"] == "f1"
    # 1.96 standard errors to both sides are 95% of a normal distribution.
    assert (strict["low"], strict["high"]) == pytest.approx((0.304, 0.696), abs=1e-4)
    assert plain["low"] is None and plain["stderr"] is None
