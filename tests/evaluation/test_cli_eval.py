"""The verb: options, table, JSON, errors that name the option."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longrecall
from longrecall.cli import eval as verb
from longrecall.errors import UserError
from tests.evaluation.conftest import command

SOURCE = str(Path(longrecall.__file__).parents[1])


def test_table_and_file(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("some words and more words " * 30)
    options = ["--lengths", "128", "--pairs", "1,2", "--distances", "0,5", "--depths", "0.5", "--samples", "4"]
    options += ["--text", str(text), "--out", str(out), "--device", "cpu", "--batch-tokens", "1k"]
    assert command(checkpoint, "--tasks", "phonebook,passkey,bits_per_byte", *options) == 0
    table = capsys.readouterr().out
    assert re.search(r"phonebook +pairs 2, distance 5 +accuracy +0\.\d{3} +0\.\d{3} \.\. [01]\.\d{3} +4\n", table)
    assert re.search(r"bits_per_byte +start 0, end 128 +bits_per_byte", table)
    assert re.search(r"^phonebook\.capacity: \d", table, re.MULTILINE)
    result = json.loads(out.read_text())
    assert len(result["results"]) == 4 + 1 + 2

    assert command(checkpoint, "--tasks", "phonebook,passkey,bits_per_byte", *options, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "phonbook"], 'unknown task "phonbook"; known tasks: phonebook, passkey, bits_per_byte'),
        (["--lengths", "512,oops"], "--lengths: length 'oops'"),
        (["--lengths", "512,"], "--lengths: length ''"),
        (["--pairs", "2,x"], '--pairs: "x" is not a number'),
        (["--pairs", "9999"], "9999 distinct names"),
        (["--depths", "2"], "between 0 and 1"),
        (["--distances", "-5"], "--distances"),
        (["--distances", "5"], "needs distractor text"),
        (["--tasks", "bits_per_byte"], "needs text"),
        (["--text", "/nowhere/text.txt"], "cannot read the text file"),
        (["--tasks", "phonebook,"], "--tasks: there is an empty entry in 'phonebook,'"),
        (["--batch-tokens", "1k,2k"], "--batch-tokens: length '1k,2k'"),
        (["--dtype", "float31"], "float31"),
        (["--batch-tokens", "0"], "--batch-tokens: length '0' must be at least 1"),
        (["--lengths", "50"], "passkey: length 50 is too short"),
        (["--out", "/dev/null/out.json"], "cannot write"),
        (["--option", "passkey"], '--option "passkey" is not of the form task.key=value'),
        (["--option", "passkey.digits"], "not of the form task.key=value"),
        (["--option", "paskey.digits=5"], 'unknown task "paskey"'),
        (["--option", "paskey.digits=5"], 'Did you mean "passkey" or'),
        (["--option", "passkey.digit=5"], 'task passkey has no option "digit"; it has depths, digits'),
        (["--option", "passkey.digit=5"], 'Did you mean "digits"'),
        (["--option", "passkey.digits=x"], '--option passkey.digits: "x" is not a whole number'),
        (["--option", "passkey.depths=0,y"], '--option passkey.depths: "y" is not a number'),
        (["--option", "passkey.opening=1"], '--option passkey.opening: "1" must be true or false'),
        (["--option", "babilong.facts=3"], '--option babilong.facts: "3" must be 2 values'),
        (["--option", "passkey.digits=5", "--option", "passkey.digits=6"], "is given twice"),
        (["--option", "copying.trained=5"], "there are options for copying, but it is not among the tasks"),
        (["--option", "passkey.digits=0"], "digits must be at least 1"),
    ],
)
def test_bad_options(checkpoint: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        command(checkpoint, "--device", "cpu", *words)


def test_any_option_of_a_task(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "passkey,babilong", "--lengths", "400", "--samples", "1", "--qa", "qa1", "--device", "cpu"]
    given = ["passkey.depths=0,1", "passkey.opening=false", "babilong.facts=2,3", "babilong.answer_tokens=1k"]
    assert command(checkpoint, *words, "--depths", "0.5", *(w for g in given for w in ("--option", g)), "--json") == 0
    options = json.loads(capsys.readouterr().out)["settings"]["options"]
    assert (options["passkey"]["depths"], options["passkey"]["opening"]) == ([0.0, 1.0], False)
    assert (options["babilong"]["facts"], options["babilong"]["answer_tokens"]) == ([2, 3], 1024)
    assert options["babilong"]["tasks"] == ["qa1"]


def test_importing_the_verb_is_light() -> None:
    code = (
        "import sys, longrecall.cli.eval; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": SOURCE}).returncode == 0


def test_help_and_example_are_consistent() -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    words = verb.EXAMPLE.split()
    assert words[:2] == ["longrecall", "eval"]
    parser.parse_args(words[2:])
    assert "phonebook" in parser.format_help()
