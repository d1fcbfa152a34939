from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from longrecall.cli import train as verb
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.training.recipe import Recipe


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    return parser.parse_args(words)


@pytest.fixture
def recipe_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_recipe().to_dict()))
    return str(path)


def test_dry_run_prints_the_plan(recipe_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(arguments(recipe_file, "--dry-run", "--set", "run.steps=9")) == 0
    out = capsys.readouterr().out
    assert "steps            9" in out and "[3, 48]" in out and "nothing was written" in out
    assert not (tmp_path / "out").exists()


def test_the_dry_run_counts_every_process(
    recipe_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = ["--set", "parallel={replicate: 3, context: 2}"]
    assert main(["train", recipe_file, "--dry-run", "--set", "run.steps=9", *mesh]) == 0
    out = capsys.readouterr().out
    assert "9 on 6 processes: replicate 3 x shard 1 x context 2\n" in out
    assert f"tokens           {9 * 3 * 2 * 3 * 48:,}\n" in out  # those of a context group read the same rows
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", recipe_file, "--dry-run", *mesh]) == 2
    assert "6 processes, but there are 4" in capsys.readouterr().err
    assert main(["train", recipe_file, "--dry-run", "--set", "parallel.context=6"]) == 2
    assert "context 6 = 6, which does not divide the 4 processes" in capsys.readouterr().err


def test_train_and_resume_print_json(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(arguments(recipe_file, "--json", "--set", "run.steps=2", "--set", "run.batch_size=1")) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["tokens"], summary["dry_run"]) == (2, 2 * 2 * 48, False)
    again = arguments(recipe_file, "--resume", "--set", "run.steps=2", "--set", "run.batch_size=1")
    assert verb.run(again) == 0
    assert "wrote" in capsys.readouterr().out


def test_files_of_a_run_are_as_readable_as_any_other(recipe_file: str, tmp_path: Path) -> None:
    assert main(["train", recipe_file, "--set", "run.steps=2"]) == 0
    (tmp_path / "other").write_text("x")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.safetensors", "process-00000.safetensors"} <= {path.name for path in files}
    assert [path for path in files if path.stat().st_mode != (tmp_path / "other").stat().st_mode] == []


@pytest.mark.parametrize(("inside", "where"), [("", "is the checkpoint"), ("runs/1", "lies inside the checkpoint")])
def test_a_run_does_not_write_into_the_checkpoint_that_it_trains(
    recipe_file: str, base: Path, inside: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(base.rglob("*"))
    for more in ([], ["--dry-run"]):
        assert main(["train", recipe_file, "--set", f"run.output={base / inside}", *more]) == 2
        told = capsys.readouterr().err.strip()
        assert where in told and "\n" not in told
    assert sorted(base.rglob("*")) == before


def test_a_refused_run_leaves_no_folder(recipe_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe_file, "--set", "data.sources.0.path=nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert main(["train", recipe_file, "--set", "data.sources.0.path=nowhere.txt"]) == 2
    assert (tmp_path / "out").is_dir()  # it is the user's


def test_bad_override_is_a_user_error(recipe_file: str) -> None:
    with pytest.raises(UserError, match='Did you mean "steps"'):
        verb.run(arguments(recipe_file, "--set", "run.step=9"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("initial_state={kind: state_pasing}", 'Did you mean "state_passing"'),
        ("initial_state={kind: noise, std: 0}", "initial_state: std must be above 0"),
        ("initial_state={kind: noise}", '"initial_state.std" is missing'),
    ],
)
def test_bad_interventions_are_one_line_and_code_2(
    recipe_file: str, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe_file, "--set", override]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told and "\n" not in told


def test_text_that_cannot_continue_is_one_line_and_code_2(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ["--set", "data.sources=[{kind: passkey}]", "--set", "data.context_length=300"]
    assert main(["train", recipe_file, "--dry-run", "--set", "initial_state={kind: truncated_bptt}", *tasks]) == 2
    told = capsys.readouterr().err.strip()
    assert "passkey cannot continue from batch to batch" in told and "\n" not in told


def test_the_verb_imports_nothing_heavy() -> None:
    code = "import sys, longrecall.cli.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    path = [str(Path(verb.__file__).parents[2])]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], check=False)
    assert done.returncode == 0


RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", [*RECIPES.glob("*.yaml"), *RECIPES.glob("papers/*.yaml")], ids=lambda p: p.name)
def test_every_example_recipe_is_valid(path: Path) -> None:
    assert Recipe.load(path).steps() > 0
