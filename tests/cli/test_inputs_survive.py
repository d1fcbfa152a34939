"""Files that a command reads are never what it writes over, whatever the options say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from longrecall.cli.main import main

SMOKE = Path(__file__).parents[2] / "recipes" / "sweeps" / "mqar_smoke.yaml"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["eval", "ckpt", "--tasks", "bits_per_byte", "--text", "mine", "--out", "mine"], "choose another --out"),
        (["diagnose", "ckpt", "--text", "mine", "--out", "./mine"], "choose another --out"),
        (["generate", "ckpt", "--prompt-file", "mine", "--save-state", "mine"], "choose another --save-state"),
        (["compare", "mine", "other", "--out", "mine"], "choose another --out"),
        (["compare", "other", "mine", "--out", "mine"], "choose another --out"),
        (["report", "other", "mine", "-o", "mine"], "choose another -o"),
        (["sweep", "mine", "--set", "run.output=mine"], "choose another run.output"),
    ],
)
def test_an_input_is_refused_as_output(
    words: list[str], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SMOKE, "mine")
    Path("other").write_text("{}")
    Path("ckpt").mkdir()  # a checkpoint that does not exist would be what is told first
    before = Path("mine").read_bytes()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "mine is an input of this command and would be overwritten" in told and advice in told
    assert told.count("\n") == 1
    assert Path("mine").read_bytes() == before
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ckpt", "mine", "other"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize(
    "words",
    [["eval", "own", "--tasks", "mqar", "--lengths", "32"], ["diagnose", "own", "--text", "text"]],
    ids=lambda x: x[0],
)
def test_results_do_not_take_the_place_of_the_model(
    words: list[str], name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "own")
    Path("text").write_text("a")
    before = Path("own", name).read_bytes()
    assert main([*words, "--out", f"own/{name}"]) == 2
    told = capsys.readouterr().err
    assert f"own/{name} is an input of this command and would be overwritten; choose another --out" in told
    assert told.count("\n") == 1 and Path("own", name).read_bytes() == before
