"""Suites of the papers: what they name exists, what they say is true, and the verb runs the offline ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation.harness.task import definition_file
from longrecall.tasks.registry import create_task, task_class
from longrecall.tasks.suites import SUITES, Piece, Suite, suite
from tests.evaluation.conftest import tiny_model


@pytest.mark.parametrize("chosen", SUITES.values(), ids=SUITES)
def test_every_task_of_a_suite_exists(chosen: Suite) -> None:
    assert len(set(chosen.tasks)) == len(chosen.tasks)
    for piece in chosen.pieces:
        if piece.task.startswith("lm_eval:"):
            assert piece.network
            if importlib.util.find_spec("lm_eval"):
                assert definition_file(piece.task.removeprefix("lm_eval:")) is not None
        else:
            names = {field.name for field in dataclasses.fields(task_class(piece.task))}
            assert set(piece.options) <= names
            if "bleu" not in piece.options.get("metrics", ()):
                create_task(piece.task, **piece.options)


def test_the_lists_are_the_papers() -> None:
    # Table 5 of the head-wise paper has 14 columns, StateX's table 8 six, RESONA's table 8 nine.
    assert len(SUITES["longbench-en"].pieces) == 14
    assert len(SUITES["statex-common-sense"].pieces) == 6
    assert len(SUITES["resona-common-sense"].pieces) == 9
    assert suite("statex-recall").options["question_answering"]["prompts"] == ("twice",)


def test_what_needs_no_network_can_be_run_alone() -> None:
    mixed = Suite("mixed", "here", (Piece("passkey"), Piece("lm_eval:piqa", network="piqa")), ("512",), 4)
    alone = mixed.offline()
    assert (alone.tasks, alone.lengths, alone.samples) == (["passkey"], ("512",), 4)
    assert [line.split(" - ")[-1] for line in mixed.describe()[1:]] == ["offline", "network: piqa"]
    assert suite("resona-needles:offline").tasks == SUITES["resona-needles"].tasks


def test_unknown_suites_and_empty_ones() -> None:
    with pytest.raises(UserError, match=r'unknown suite "statex-recal".*Did you mean "statex-recall"'):
        suite("statex-recal")
    with pytest.raises(UserError, match="every task of it needs data"):
        suite("longbench-en:offline")


def test_the_verb_lists_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--list-suites"]) == 0
    told = capsys.readouterr().out
    for name in SUITES:
        assert f"\n{name}: " in f"\n{told}"
    assert main(["eval", "--harness-path"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "longrecall_phonebook.yaml").is_file()


def test_the_verb_runs_a_suite(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, out = tmp_path / "tiny", tmp_path / "result.json"
    tiny_model().save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    arguments = ["eval", str(checkpoint), "--suite", "headwise-needles", "--samples", "2", "--out", str(out)]
    # The lengths are the suite's unless given; an option that is given goes before the suite's.
    assert main([*arguments, "--lengths", "1k", "--option", "niah_multikey_1.answer_tokens=8"]) == 0
    assert "niah_multikey_1 - offline" in capsys.readouterr().err
    settings = json.loads(out.read_text())["settings"]
    assert (settings["tasks"], settings["lengths"], settings["samples"]) == (["niah_multikey_1"], [1024], 2)
    assert settings["options"]["niah_multikey_1"]["answer_tokens"] == 8
    assert main([*arguments, "--tasks", "phonebook"]) == 2
    assert "not both" in capsys.readouterr().err
