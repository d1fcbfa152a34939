"""The verb on real checkpoints: tables, file, JSON, a broken model, and everything that can be wrong with the input."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from longrecall import RecurrentConfig, RecurrentLM, load
from longrecall.cli.main import main
from longrecall.diagnostics import read_diagnosis
from longrecall.models.byte_tokenizer import byte_tokenizer

TEXT = "It was the best of times, it was the wörst of times. " * 60
QUICK = ["--multiple", "4", "--training-length", "64", "--sequences", "3", "--recall-samples", "5", "--device", "cpu"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "held out.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that must fail as bad input."""
    assert main(["diagnose", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


def test_tables_file_and_json(checkpoint: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "diagnosis.json"
    assert main(["diagnose", str(checkpoint), "--text", text, "--out", str(out), *QUICK]) == 0
    captured = capsys.readouterr()
    table = captured.out
    assert re.search(r"^0 \.\. 8 +\d\.\d{3} ", table, re.MULTILINE) and re.search(
        r"^215 \.\. 256 ", table, re.MULTILINE
    )
    assert re.search(r"^layer 0  gla +\d+\.\d{3}", table, re.MULTILINE) and "layer 1" not in table
    assert re.search(r"^left out +effective remembrance", table, re.MULTILINE)
    # Five keys do not settle it, so five more are asked.
    assert re.search(r"^128 +0\.000 +0\.000 \.\. 0\.\d{3} +10$", table, re.MULTILINE)
    assert "maximum recall length above 0.5: none, 0.6: none" in table
    shares = [int(share) for share in re.findall(r"\((\d+)%\)", table.split("time: ")[1].splitlines()[0])]
    assert len(shares) == 4 and 98 <= sum(shares) <= 102  # four numbers rounded to whole percent
    assert "verdict\n  " in table and "longrecall train recipes/post_train.yaml" in table
    assert captured.err.endswith(f"written to {out}\n")

    result = read_diagnosis(out)
    assert {"schema", "kind", "created", "longrecall", "environment", "checkpoint", "settings"} <= set(result)
    assert result["settings"]["text"] == "held out.txt" and result["settings"]["training_length"] == 64
    assert result["checkpoint"]["path"] == str(checkpoint)
    assert set(result["perplexity"][0]) >= {"start", "end", "loss", "bits_per_byte", "low", "high", "count"}
    head = result["state"]["layers"][0]["heads"][0]
    assert {len(values) for values in head.values()} == {len(result["state"]["positions"])}

    assert main(["diagnose", str(checkpoint), "--text", text, "--json", *QUICK]) == 0
    again = json.loads(capsys.readouterr().out)
    for key in ("perplexity", "state", "remembrance", "recall", "verdict"):
        assert again[key] == result[key]


def test_too_few_keys_are_said_to_be_too_few(
    checkpoint: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    luck = itertools.cycle([True, False])
    monkeypatch.setattr("longrecall.diagnostics.diagnosis.recalled_keys", lambda model, keys, *_: [next(luck)])
    few = ["--parts", "recall", "--recall-doublings", "0", "--out", str(tmp_path / "few.json")]
    words = ["diagnose", str(checkpoint), "--text", text, *QUICK, *few]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "maximum recall length above 0.5: 128 (none to 256), 0.6: none (none to 256)" in table
    line = "unsure: it is unclear whether recall ends: at 128 tokens accuracy is 0.600 (95% interval 0.231 to 0.882, 5"
    assert line in table and "--parts recall --recall-doublings 2" in table and "healthy" not in table
    # A finished diagnosis that is resumed is shown again, nothing is read.
    assert main([*words, "--resume"]) == 0 and capsys.readouterr().out == table
    assert "cannot resume" in fails(capsys, *words[1:], "--resume", "--seed", "1")


def test_chosen_parts_and_starts(checkpoint: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parts", "remembrance", "--starts", "0,64,128", "--json"]
    assert main(["diagnose", str(checkpoint), "--text", text, *words, *QUICK]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [point["t"] for point in result["remembrance"]["points"]] == [0, 64, 128]
    assert result["perplexity"] == [] and list(result["timing"]) == ["remembrance"]


def test_a_diverging_checkpoint_is_a_finding(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(checkpoint)
    with torch.no_grad():
        model.model.embeddings.weight[ord("#")] = math.nan
    broken, text = tmp_path / "broken", tmp_path / "text.txt"
    model.save_pretrained(broken)
    byte_tokenizer().save_pretrained(broken)
    text.write_text("a" * 100 + "#" + "a" * 400)
    words = ["--multiple", "4", "--training-length", "64", "--sequences", "1", "--parts", "perplexity,state"]
    assert main(["diagnose", str(broken), "--text", str(text), *words]) == 0
    table = capsys.readouterr().out
    assert "diverged: the model diverges: the embedding is not finite after 100 tokens (part perplexity)" in table
    assert re.search(r"^108 \.\. 128 +diverged", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--parts", "perplexty"],
            'unknown part "perplexty"; there are perplexity, state, remembrance, recall. Did you',
        ),
        (["--parts", "state,state"], "part state is listed 2 times"),
        (["--parts", ""], 'unknown part ""'),
        (["--starts", "0,256"], "t = 256 is outside the sequence; it counts the tokens left out, 0 to 255"),
        (["--starts", "x"], "--starts: length 'x'"),
        (["--multiple", "1"], "multiple must be at least 2"),
        (["--multiple", "400"], "fewer than the 25600 to read; give a longer text, a smaller --multiple"),
        (["--training-length", "0"], "--training-length: length '0' must be at least 1"),
        (["--training-length", "1"], "the training length must be at least 2"),
        (["--training-length", "16"], "passkey: length 64 is too short"),
        (["--sequences", "0"], "sequences must be at least 1"),
        (["--recall-samples", "0"], "recall-samples must be at least 1"),
        (["--recall-doublings", "-1"], "recall-doublings must be from 0 to 16, got -1"),
        (["--resume"], "resume needs an output file (--out)"),
        (["--batch-tokens", "no"], "--batch-tokens: length 'no'"),
        (["--out", "/dev/null/out.json"], "cannot write /dev/null/out.json"),
        (["--dtype", "float31"], "float31"),
    ],
)
def test_bad_options(
    checkpoint: Path, text: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, str(checkpoint), "--text", text, *QUICK, *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read the text file"), (b"", "is empty"), (b"good \xff bad", "not UTF-8: byte 0xff at offset 5")],
)
def test_bad_texts(
    checkpoint: Path, tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert message in fails(capsys, str(checkpoint), "--text", str(path), *QUICK)


def test_bad_checkpoints(checkpoint: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not say how long" in fails(capsys, str(checkpoint), "--text", text, "--multiple", "4")
    layers = [{"mixer": {"type": "attention", "num_heads": 1, "head_dim": 4, "window": 8}}]
    for name, vocabulary in (("windows", 258), ("words", 99)):
        model = RecurrentLM(RecurrentConfig(vocab_size=vocabulary, hidden_size=4, layers=layers))
        model.save_pretrained(tmp_path / name)
    capsys.readouterr()
    message = fails(capsys, str(tmp_path / "windows"), "--text", text, "--parts", "state", *QUICK)
    assert "no recurrent layers" in message
    assert "has no tokenizer files" in fails(capsys, str(tmp_path / "words"), "--text", text, *QUICK)
    assert main(["diagnose", str(tmp_path / "windows"), "--text", text, *QUICK]) == 0
    assert "no recurrent layers" in capsys.readouterr().out


def test_an_unwritable_out_is_refused_before_the_work(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The folder holds no checkpoint either; the place of the result is looked at first.
    assert "cannot write" in fails(capsys, str(tmp_path), "--text", text, "--out", "/dev/null/out.json")
