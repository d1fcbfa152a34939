"""Input of the kind that nobody means: one line that says what is wrong, exit code 2, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import longrecall
from longrecall.cli.expand import parse_options
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation import evaluate_checkpoint
from longrecall.files import check_replaceable
from longrecall.models.checkpoint import open_checkpoint
from longrecall.surgery.expansion import expand
from longrecall.training.strict_yaml import apply_override, read_yaml
from longrecall.units import parse_length
from tests import warm

ASSET = Path(longrecall.__file__).parent / "assets" / "mamba2-base"
COMMAND = [sys.executable, "-c", "import sys; from longrecall.cli.main import main; sys.exit(main())"]
DIGITS = "9" * 5000
NESTED = "[" * 100_000


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must end with exit code 2 and return its one line."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def without_input(*words: str) -> int:
    """A command whose standard input is closed: Python has None for it then."""
    os.close(0)
    sys.stdin = None  # type: ignore[assignment]
    return main(list(words))


def test_a_closed_input_is_not_a_crash(tmp_path: Path) -> None:
    """Only `generate` reads it, which takes seconds to import what it needs in a new process."""
    done = warm.run(without_input, "generate", "nope", "--prompt-file", "-", folder=tmp_path)
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_are_not_a_crash(closed: str, tmp_path: Path) -> None:
    line = f'"$@" {closed}'
    words = ["info", str(ASSET)] if closed == ">&-" else ["info", "nope"]
    done = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *words],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    assert done.returncode == (0 if closed == ">&-" else 2)
    assert done.stderr == ""


def test_a_home_that_nobody_has(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = "~no-such-user/x"
    for words in (["info", place], ["expand", str(checkpoint), place, "--method", "add_retrieval"]):
        assert f"{place} begins with the home folder of an unknown user" in refusal(words, capsys)


def test_nothing_is_replaced_even_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.chdir(tmp_path)
    check_replaceable(tmp_path / "other")
    with pytest.raises(UserError, match="working, home or system folder"):
        check_replaceable(tmp_path.parent)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seed", str(2**63), "--prompt", "a"], "--seed must be a whole number from 0 to 2**63 - 1"),
        (["--device", "meta", "--prompt", "a"], 'device "meta" holds no numbers; use cpu or cuda'),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8"),
    ],
)
def test_generate_refuses(words: list[str], told: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refusal(["generate", str(checkpoint), *words], capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch", str(10**20)], "--batch must be at most 2,147,483,647"),
        (["--threads", str(10**11)], "--threads must be at most 2,147,483,647"),
        (["--length", str(10**20)], "is too long; it must be at most 9,007,199,254,740,992 tokens"),
    ],
)
def test_bench_refuses_counts_that_no_machine_has_room_for(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(["bench", "ops", *words], capsys)


def test_lengths_of_thousands_of_digits() -> None:
    with pytest.raises(UserError, match="is not a number of tokens"):
        parse_length(DIGITS)


@pytest.mark.parametrize("text", [NESTED, DIGITS, f'{{"layers": {DIGITS}}}'], ids=["nested", "digits", "digits-inside"])
def test_json_and_yaml_that_python_cannot_hold(
    text: str, tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    for verb in (["init", str(bad), str(tmp_path / "out")], ["report", str(bad), "-o", str(tmp_path / "page.html")]):
        assert str(bad) in refusal(verb, capsys)
    with pytest.raises(UserError, match=r"is not a recipe|must hold a mapping"):
        read_yaml(bad)
    own = tmp_path / "own"
    shutil.copytree(checkpoint, own)
    (own / "surgery.json").write_text(text)
    with pytest.raises(UserError, match=r"surgery\.json cannot be read as JSON"):
        open_checkpoint(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "own"]


def test_an_override_that_is_no_date() -> None:
    with pytest.raises(UserError, match="the value is not valid YAML"):
        apply_override({}, "run.output=2024-99-99")


@pytest.mark.parametrize("text", ["1e-3", "1.e-3", "1.0e-3", "+1E-03"])
def test_options_of_expand_are_numbers_in_every_spelling(text: str) -> None:
    assert parse_options([f"noise_scale={text}"]) == {"noise_scale": 1e-3}


def test_options_that_look_like_dates_are_refused() -> None:
    with pytest.raises(UserError, match="the value is not a number"):
        parse_options(["noise_scale=2024-99-99"])


def test_expand_writes_no_infinity(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match="would hold NaN or Inf"):
        expand(checkpoint, tmp_path / "out", "add_retrieval", layers=[0], noise_scale=1e60)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [{"phonebook": {"pairs": (2, 4, 2)}}, {"passkey": {"depths": (0.5, 0.5)}}],
    ids=lambda options: next(iter(options)),
)
def test_a_cell_is_measured_once(options: dict[str, dict[str, Any]], checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"asked for twice; name each value once"):
        evaluate_checkpoint(str(checkpoint), list(options), ["128"], samples=2, options=options)


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "-1"], ["--samples", "0"]])
def test_a_demo_that_cannot_run_keeps_the_earlier_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for name, text in (("demo.json", '{"schema": 1, "kind": "demo"}'), ("before.json", "kept")):
        (tmp_path / name).write_text(text)
    assert f"{words[0]} must be at least 1" in refusal(["demo", "--out", str(tmp_path), *words], capsys)
    assert (tmp_path / "before.json").read_text() == "kept"


def _entry(result: dict[str, Any], **fields: Any) -> None:
    result["results"][0].update(fields)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda result: _entry(result, value=10**400), 'results[0] has no valid "value"'),
        (lambda result: _entry(result, cell={"pairs": 10**400, "distance": 0}), 'results[0] has no number "pairs"'),
        (
            lambda result: _entry(result, cell={"pairs": float("inf"), "distance": 0}),
            'results[0] has no number "pairs"',
        ),
        (lambda result: result["checkpoint"].update(surgery=[{"layers": 1}]), '"surgery" is no list of records'),
        (lambda result: result["checkpoint"].update(surgery=[3]), '"surgery" is no list of records'),
    ],
)
def test_damaged_results_make_no_page(
    damage: Callable[[dict[str, Any]], None],
    told: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    with torch.random.fork_rng():
        result = evaluate_checkpoint(
            str(checkpoint), ["phonebook"], ["64"], samples=2, options={"phonebook": {"pairs": (2,)}}
        )
    damage(result)
    file.write_text(json.dumps(result))
    line = refusal(["report", str(file), "-o", str(page)], capsys)
    assert told in line and str(file) in line and not page.exists()


def test_the_config_of_a_checkpoint_is_a_description(checkpoint: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["init", str(checkpoint / "config.json"), str(again), "--tokenizer", str(checkpoint)]) == 0
    assert open_checkpoint(again).config.to_dict() == open_checkpoint(checkpoint).config.to_dict()
