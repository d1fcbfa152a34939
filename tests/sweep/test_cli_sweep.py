from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.json_lines import JsonLines
from longrecall.sweep.journal import Journal
from longrecall.sweep.training import ModelRun

Write = Callable[..., Path]


def result(recipe: Path, name: str | None = None) -> dict[str, Any]:
    path = recipe.with_name(f"{name or recipe.stem}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_sweep_from_recipe_to_result(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tasks=[{"name": "mqar", "settings": {"vocab_size": 16}, "grid": {"length": [8], "pairs": [1, 2]}}])
    assert main(["sweep", str(recipe)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mqar: accuracy") and lines[1].split() == ["pairs=1", "pairs=2"]
    assert [line.split()[0] for line in lines[2:4]] == ["gla", "retnet"]
    found = result(recipe)
    assert (found["schema"], found["kind"], found["complete"], found["runs"]) == (1, "sweep", True, 8)
    assert {"created", "longrecall", "environment", "recipe"} <= found.keys()
    assert not list(recipe.parent.glob("*.partial"))
    for row in found["rows"]:
        assert row["status"] == "done" and row["steps"] == 6 and len(row["history"]) == 2
        assert row["parameters"] > 0 and row["state_size"] > 0 and 0 <= row["accuracy"] <= 1
    # The table shows the better of the two learning rates.
    for line, mixer in zip(lines[2:4], ("gla", "retnet"), strict=True):
        for shown, pairs in zip(line.split()[1:], (1, 2), strict=True):
            rows = [r for r in found["rows"] if r["model"]["mixer"] == mixer and r["settings"]["pairs"] == pairs]
            assert len(rows) == 2 and shown == f"{max(row['accuracy'] for row in rows):.3f}"


def test_json(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    assert main(["sweep", str(recipe), "--json", "--set", "training.epochs=1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["runs"], facts["done"], facts["failed"], facts["complete"]) == (4, 4, 0, True)
    assert [entry["model"]["mixer"] for entry in facts["best"]] == ["gla", "retnet"]
    assert main(["sweep", str(recipe), "--json", "--dry-run"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["runs"] == 4 and [entry["runs"] for entry in facts["plan"]] == [2, 2]
    assert all(entry["parameters"] > 0 and entry["steps"] == 6 for entry in facts["plan"])


def test_a_dry_run_writes_nothing(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    before = sorted(recipe.parent.iterdir())
    assert main(["sweep", str(recipe), "--dry-run"]) == 0
    assert "4 runs; dry run" in capsys.readouterr().out
    assert sorted(recipe.parent.iterdir()) == before


def test_an_interrupted_sweep_goes_on(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, recipe = write("whole"), write("broken")
    assert main(["sweep", str(whole)]) == 0
    trained: list[str] = []
    take = ModelRun._take

    def interrupted(self: ModelRun, *arguments: Any) -> None:
        trained.append(self.spec.key)
        if len(set(trained)) == 3:
            raise KeyboardInterrupt
        take(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRun, "_take", interrupted)
        assert main(["sweep", str(recipe)]) == 130
    journal = recipe.with_name("broken.json.partial")
    assert len(journal.read_text().splitlines()) == 3 and not recipe.with_name("broken.json").exists()
    capsys.readouterr()
    assert main(["sweep", str(recipe)]) == 2
    assert "broken.json.partial holds an interrupted run; --resume continues" in capsys.readouterr().err
    # A kill in the middle of a line leaves half of it.
    with journal.open("a") as file:
        file.write('{"key": "half')
    again: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(ModelRun, "_take", lambda self, *a: (again.append(self.spec.key), take(self, *a))[1])
        assert main(["sweep", str(recipe), "--resume"]) == 0
    assert set(trained[:2]) & set(again) == set() and len(set(again)) == 2
    assert result(recipe)["rows"] == result(whole)["rows"] and not journal.exists()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRun, "_take", interrupted)  # would raise: nothing is trained any more
        assert main(["sweep", str(recipe), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 4


def test_rows_outlast_a_full_disk_where_a_sweep_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"key": key, "status": "done"} for key in "abc"]
    Journal(tmp_path / "out.json", None, resume=False).finish({"schema": 1, "kind": "sweep", "rows": rows})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", full)
        patch.setattr("longrecall.files.os.replace", full)
        with pytest.raises((UserError, OSError), match="no space left"):
            Journal(tmp_path / "out.json", None, resume=True).start()
    assert list(Journal(tmp_path / "out.json", None, resume=True).done) == list("abc")


def test_rows_are_replaced_with_force_only(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    out, link = recipe.with_suffix(".json"), recipe.with_name("recipe.json.partial")
    assert main(["sweep", str(recipe)]) == 0
    before = out.read_bytes()
    capsys.readouterr()
    for words, reason in {
        (): "recipe.json exists already; --resume keeps it and does what is missing, --force replaces it, or choose",
        ("--force", "--resume"): "give one of them",
        ("--force", "--set", f"run.output={recipe.parent / 'lost' / 'x.json'}"): "which is not there",
    }.items():
        (recipe.parent / "lost").unlink(missing_ok=True)
        (recipe.parent / "lost").symlink_to("nowhere")
        assert main(["sweep", str(recipe), *words]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1 and out.read_bytes() == before
    link.symlink_to("precious")
    assert main(["sweep", str(recipe), "--force"]) == 2
    assert "recipe.json.partial" in capsys.readouterr().err and not recipe.with_name("precious").exists()
    link.unlink()
    assert main(["sweep", str(recipe), "--force", "--shard", "1/2"]) == 0
    assert main(["sweep", str(recipe), "--force"]) == 0
    assert json.loads(out.read_bytes())["rows"] == json.loads(before)["rows"]
    (recipe.parent / "lost").unlink()
    names = ["recipe.1of2.json", "recipe.json", "recipe.yaml"]
    assert sorted(path.name for path in recipe.parent.iterdir()) == names


def test_shards_together_are_the_whole(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = write("whole"), write("parts")
    assert main(["sweep", str(whole)]) == 0
    for index in (1, 2, 3):
        assert main(["sweep", str(parts), "--shard", f"{index}/3"]) == 0
    rows = [row for index in (1, 2, 3) for row in result(parts, f"parts.{index}of3")["rows"]]
    assert sorted(row["key"] for row in rows) == sorted(row["key"] for row in result(whole)["rows"])
    assert not parts.with_name("parts.json").exists()
    capsys.readouterr()
    assert main(["sweep", str(parts), "--resume"]) == 0
    assert result(parts)["rows"] == result(whole)["rows"] and result(parts)["complete"]


@pytest.mark.slow
def test_processes_give_the_rows_of_one(write: Write) -> None:
    one, two = write("one"), write("two")
    assert main(["sweep", str(one)]) == 0
    assert main(["sweep", str(two), "--set", "run.parallel=2"]) == 0
    assert result(two)["rows"] == result(one)["rows"]


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_row_says_at_which_precision_it_was_trained(write: Write, parallel: int) -> None:
    recipe = write()
    words = ["--set", f"run.parallel={parallel}", "--set", "run.matmul_precision=high"]
    assert main(["sweep", str(recipe), *words]) == 0
    assert {row["matmul_precision"] for row in result(recipe)["rows"]} == {"high"}
    assert result(recipe)["recipe"]["run"]["matmul_precision"] == "high"
    assert main(["sweep", str(recipe), "--resume"]) == 0
    assert {row["matmul_precision"] for row in result(recipe)["rows"]} == {"high"}


def test_a_run_that_cannot_be_is_a_row(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Three heads of a third of the width: possible at 12, not at 8."""
    mixer = {"type": "gla", "num_heads": 3, "key_dim": "width/3", "value_dim": "width/3", "label": "thirds"}
    recipe = write(models={"mixers": [mixer], "hidden_sizes": [8, 12], "layers": 1})
    assert main(["sweep", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 runs failed" in out and "not a whole number at width 8" in out
    rows = result(recipe)["rows"]
    assert [row["status"] for row in rows] == ["failed", "failed", "done", "done"]
    assert rows[0]["accuracy"] is None and "width 8" in rows[0]["reason"] and rows[0]["history"] == []
    assert main(["sweep", str(recipe), "--dry-run"]) == 0
    assert "cannot be built" in capsys.readouterr().out
    created = [row["key"] for row in rows]
    assert main(["sweep", str(recipe), "--resume", "--retry"]) == 0
    assert [row["key"] for row in result(recipe)["rows"]] == created


def test_a_spent_budget_leaves_the_rest(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    assert main(["sweep", str(recipe), "--set", "run.budget=1e-9"]) == 0
    assert "4 of 4 runs are left: --resume goes on" in capsys.readouterr().out
    assert result(recipe)["complete"] is False and result(recipe)["rows"] == []
    assert main(["sweep", str(recipe), "--resume"]) == 0
    assert result(recipe)["complete"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "task=1"], 'unknown key "task"'),
        (["--set", "tasks=[]"], "tasks is empty"),
        (["--set", "tasks.0.name=mqarr"], "mqar"),
        (["--set", "tasks.0.settings.length=7"], "length"),
        (["--set", "tasks.0.settings.length=eight"], "length"),
        (["--set", "tasks.0.settings.train=0"], "train"),
        (["--set", "tasks.0.vary={pairs: 1}"], "must be a list"),
        (["--set", "models.mixers=[gal]"], 'Did you mean "gla"?'),
        (["--set", "models.mixers=[{type: nothing}]"], "unknown mixer type"),
        (["--set", "models.mixers=[{type: gla, num_heads: 0, key_dim: 1, value_dim: 1}]"], "num_heads"),
        (["--set", "models.retrieval={layer: 5}"], "no layer 5"),
        (["--set", "models.retrieval={chunk: 5}"], "layer: 0"),
        (["--set", "models.hidden_sizes=[0]"], "hidden_sizes"),
        (["--set", "models.norm=layers"], 'Did you mean "layer"?'),
        (["--set", "models.norm={gla: rms}"], "norm has no entry for retnet"),
        (["--set", "models.second_norm={gal: true, others: true}"], 'Did you mean "gla"?'),
        (["--set", "models.second_norm=1"], "true or false"),
        (["--set", "models.second_norm=true", "--set", "models.mlp=8"], "without an MLP"),
        (["--set", "tasks.0.train=[{length: 8}]"], "say in test"),
        (["--set", "tasks.0.test=[{rows: 0}]"], "rows must be a whole number"),
        (["--set", "tasks.0.test=[{vocab_size: 32}]"], "vocab_size must be the same, got 16, 32"),
        (["--set", "training.patience=-1"], "patience"),
        (["--set", "models.mlp={gla: 8}"], "mlp has no entry for retnet"),
        (["--set", "models.mlp=-1"], "must be a width"),
        (["--set", "training.learning_rates={logspace: [1, 2]}"], "logspace"),
        (["--set", "training.learning_rates=[-1]"], "above 0"),
        (["--set", "training.metric=loss"], "metric"),
        (["--set", "training.batch_size={4: 8}"], "no entry for a length of 8"),
        (["--set", "training.batch_size={}"], "empty mapping"),
        (["--set", "training.dropout=1"], "dropout"),
        (["--set", "training.schedule=cosin"], "cosine"),
        (["--set", "run.device=abacus"], "abacus"),
        (["--set", "run.parallel=0"], "parallel"),
        (["--set", "run.matmul_precision=tf32"], "matmul_precision"),
        (["--set", "run.output=."], "run: output"),
        (["--shard", "5/4"], "--shard"),
        (["--shard", "5/5"], "use fewer shards"),
        (["--retry"], "--resume"),
    ],
)
def test_bad_input(words: list[str], message: str, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(write()), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_that_cannot_be_resumed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    out, journal = recipe.with_suffix(".json"), recipe.with_name("recipe.json.partial")
    damaged = '{"schema": 1, "kind": "partial sweep"}\n{"key": 1}\n{"key": "a", "status": "done"}\n'
    for path, text, message in (
        (out, '{"schema": 1, "kind": "evaluation"}', "not a result file of sweep"),
        (out, "{", "cannot resume"),
        (journal, damaged, "no key or no status"),
        (journal, '{"kind": "partial evaluation"}\n\n', "line 1 is damaged"),
    ):
        path.write_text(text, encoding="utf-8")
        assert main(["sweep", str(recipe), "--resume"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        path.unlink()
    assert main(["sweep", str(recipe)]) == 0
    capsys.readouterr()
    assert main(["sweep", str(recipe), "--resume", "--set", "training.learning_rates=[0.003]"]) == 2
    assert "2 rows of runs that are not in this recipe" in capsys.readouterr().err
