"""Every verb that writes a file keeps one rule: one writer, nothing replaced without --force, no links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import longrecall
from longrecall.cli.main import VERBS, build_parser, main

Fails = Callable[..., str]
SMALL = ["--device", "cpu"]
WORDS = {
    "eval": ["eval", "model", "--tasks", "passkey", "--lengths", "256", "--samples", "2", "--depths", "0", *SMALL],
    "search": ["eval", "model", "--tasks", "passkey", "--search", "256", "--step", "256", "--samples", "2", *SMALL],
    "diagnose": ["diagnose", "model", "--text", "text", "--training-length", "16", "--parts", "perplexity", *SMALL],
    "generate": ["generate", "model", "--prompt", "abc", *SMALL],
    "compare": ["compare", "first.json", "second.json"],
    "report": ["report", "first.json"],
}
OPTION = {"generate": "--save-state", "report": "-o"}


@pytest.fixture(scope="module")
def inputs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(checkpoint, folder / "model")
    (folder / "text").write_text("It was the best of times, it was the worst of times. " * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*WORDS["eval"], "--out", "first.json"]) == 0
        shutil.copy("first.json", "second.json")
    return folder


@pytest.fixture
def fails(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fails]:
    """Run a command that must be refused with one line; gives the line. The folder stays as it was."""
    monkeypatch.chdir(inputs)

    def run(*words: str) -> str:
        before = {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main(list(words)) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()} == before
        return told

    yield run
    for place in (inputs / "out", inputs / "link"):
        place.unlink(missing_ok=True)


@pytest.mark.parametrize("verb", WORDS)
def test_a_result_is_replaced_with_force_only(verb: str, fails: Fails, inputs: Path) -> None:
    words, option = WORDS[verb], OPTION.get(verb, "--out")
    assert main([*words, option, "out"]) == 0
    first = (inputs / "out").stat().st_ino
    told = fails(*words, option, "out")
    assert "out exists already; " in told and f"--force replaces it, or choose another {option}" in told
    assert main([*words, option, "out", "--force"]) == 0
    assert (inputs / "out").stat().st_ino != first
    assert [path.name for path in inputs.iterdir() if path.name.startswith((".", "out"))] == ["out"]


@pytest.mark.parametrize("verb", WORDS)
def test_no_result_goes_through_a_link_or_into_a_checkpoint(verb: str, fails: Fails, inputs: Path) -> None:
    words, option = WORDS[verb], OPTION.get(verb, "--out")
    (inputs / "link").symlink_to("nowhere/deep")
    assert "link is a link to " in fails(*words, option, "link", "--force")
    assert not (inputs / "nowhere").exists()
    (inputs / "link").unlink()
    (inputs / "link").symlink_to("precious")
    (inputs / "precious").touch()
    assert "it is a link, and results are not written through links" in fails(*words, option, "link", "--force")
    assert "model/new/out lies inside the checkpoint folder " in fails(*words, option, "model/new/out", "--force")


HOLDER = """
import sys
from longrecall.outputs import claim_file
with claim_file("out"):
    print(flush=True)
    sys.stdin.read()
"""


def test_what_another_process_writes_is_refused_until_it_is_dead(fails: Fails, inputs: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(longrecall.__file__).parents[1])}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        try:
            holder.stdout.readline()
            for verb, words in WORDS.items():
                told = fails(*words, OPTION.get(verb, "--out"), "out", "--force")
                assert f"out is being written by process {holder.pid} on " in told
        finally:
            holder.kill()
    assert main([*WORDS["compare"], "--out", "out"]) == 0
    assert [path.name for path in inputs.iterdir() if path.name.startswith((".", "out"))] == ["out"]


def test_every_verb_that_writes_knows_force() -> None:
    silent = {"info", "bench", "serve", "doctor"}  # they only print or answer
    (children,) = (action.choices for action in build_parser()._actions if action.dest == "verb")
    assert children is not None
    for verb in set(VERBS) - silent:
        assert "--force" in children[verb].format_help(), verb  # type: ignore[index]
