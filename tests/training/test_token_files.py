"""`longrecall tokenize`: the same files whatever the number of processes, after a kill too, and training on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from longrecall.cli.main import main
from longrecall.training import token_files
from longrecall.training.recipe import Recipe
from tests.training.runs import train

MakeRecipe = Callable[..., Recipe]
LINES = [json.dumps({"text": f"document {number} " * (number % 7 + 1)}) for number in range(300)]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of documents that makes five shards."""
    monkeypatch.setattr(token_files, "SHARD_BYTES", 4096)
    monkeypatch.setattr("longrecall.training.tokenizing.CHUNK_BYTES", 1000)
    (tmp_path / "d.jsonl").write_text("\n".join(LINES))
    return tmp_path / "d.jsonl"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_processes_writes_the_same(base: Path, lines: Path, tmp_path: Path) -> None:
    for workers in ("0", "2"):
        words = ["tokenize", str(lines), "--tokenizer", str(base), "--out", str(tmp_path / workers)]
        assert main([*words, "--workers", workers]) == 0
    assert contents(tmp_path / "0") == contents(tmp_path / "2")
    index = json.loads((tmp_path / "0" / "tokens.json").read_text())
    assert len(index["shards"]) == 5 and index["documents"] == 300 and index["dtype"] == "uint16"
    assert index["tokens"] == sum(len(json.loads(line)["text"]) + 1 for line in LINES)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_interrupted_run_goes_on_and_a_changed_one_begins_anew(
    base: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tokenize", str(lines), "--tokenizer", str(base), "--workers", "0", "--json", "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    original, written = token_files._write_shard, []

    def killed(work: Any, number: int, first: int, last: int) -> None:
        if number == 4:
            (work.folder / "00004.tokens").write_bytes(b"half")
            raise KeyboardInterrupt
        original(work, number, first, last)
        written.append(number)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "_write_shard", killed)
        assert main([*words, str(out)]) == 130
    assert not out.exists() and written == [0, 1, 2, 3]
    capsys.readouterr()
    assert main([*words, str(out)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reused"] == 4
    assert contents(out) == contents(tmp_path / "whole")

    with monkeypatch.context() as patch:
        patch.setattr(token_files, "_write_shard", killed)
        assert main([*words, str(out), "--force"]) == 130
    assert contents(out) == contents(tmp_path / "whole")
    lines.write_text("\n".join([*LINES, LINES[0]]))
    capsys.readouterr()
    assert main([*words, str(out), "--force"]) == 0
    summary = json.loads(capsys.readouterr().out)[0]
    assert (summary["reused"], summary["documents"]) == (0, 301)


def test_training_on_the_sources_of_a_recipe(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    assert main(["tokenize", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "tokens")]) == 0
    source = f"data.sources.0={{kind: tokens, path: {tmp_path / 'tokens' / '0'}}}"
    alone = train(make_recipe(source, "run.save_every=2", "data.workers=0"))
    assert train(make_recipe(source, f"run.output={tmp_path / 'helped'}", "data.workers=2")) == alone
    # Workers may come and go.
    assert train(make_recipe(source, "run.save_every=2", "data.workers=1"), resume=True) == alone
    row = json.loads((tmp_path / "helped" / "log.jsonl").read_text().splitlines()[-1])
    assert 0.0 <= row["data_wait"] <= 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["d.jsonl", "--out", "o"], "--tokenizer is missing"),
        (["d.jsonl", "text.txt", "--tokenizer", "base", "--out", "o"], "several kinds (jsonl, text)"),
        (["none.jsonl", "--tokenizer", "base", "--out", "o"], "there is no file or folder none.jsonl"),
        (["base/config.json", "--tokenizer", "base", "--out", "o"], "give --kind"),
        (["d.jsonl", "--tokenizer", "base", "--out", "base", "--force"], "base is a checkpoint"),
        (["d.jsonl", "--tokenizer", "base", "--out", "base/new"], "lies inside the checkpoint"),
        (["d.jsonl", "--tokenizer", "base", "--out", "d.jsonl"], "is a file"),
        (["d.jsonl", "--tokenizer", "base", "--out", "full"], "full is not empty"),
        (["d.jsonl", "--tokenizer", "base", "--out", "o", "--field", "body"], 'line 1 is not a JSON object with text'),
        (["d.jsonl", "--tokenizer", "base", "--out", "o", "--workers", "-1"], "--workers must be 0 or more"),
        (["task.yaml", "d.jsonl", "--out", "o"], "task.yaml is a recipe; give one recipe alone"),
        (["task.yaml", "--out", "o"], "no source of text, jsonl or parquet files"),
    ],
)  # fmt: skip
def test_bad_words(
    words: list[str],
    message: str,
    base: Path,
    text: Path,
    make_recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text("\n".join(LINES))
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(make_recipe("data.sources=[{kind: passkey}]").to_dict()))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["tokenize", *words]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in told, told
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []
