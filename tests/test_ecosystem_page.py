"""The page on other libraries: every block of it runs, in its order, beside a tiny checkpoint of the name it uses."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from longrecall.models.byte_tokenizer import byte_tokenizer
from tests.evaluation.conftest import tiny_model

PAGE = (Path(__file__).parents[1] / "docs" / "ecosystem.md").read_text(encoding="utf-8")
LINE = "The name of the river is Aare. The first name is Ada, and the last name is Lovelace."

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::UserWarning"
)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # On a machine with a GPU too: the blocks name no device, and train two models on the one that they find.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny_model().save_pretrained("CKPT")
    byte_tokenizer().save_pretrained("CKPT")
    Path("text.txt").write_text(f"{LINE}\n" * 6)
    return tmp_path


def test_the_blocks_in_python_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("peft", "lm_eval"):
        pytest.importorskip(name)
    names: dict[str, Any] = {}
    found = blocks("python")
    assert len(found) == 6
    for index, block in enumerate(found):
        exec(compile(block, f"block {index + 1} of docs/ecosystem.md", "exec"), names)
    assert {"eval_loss", "eval_runtime"} <= names["trainer"].evaluate().keys()
    written = capsys.readouterr().out
    assert "trainable params:" in written and "generated_text" in written
    assert "accuracy,none" in names["found"]["results"]["longrecall_phonebook"]
    for folder in ("run/model", "merged"):
        assert (place / folder / "model.safetensors").exists()


def test_the_commands_run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from longrecall.evaluation.harness.__main__ import main

    class Ours(TaskManager):  # type: ignore[misc]
        """Without the harness's own 14 000 files, which take seconds to index."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"include_defaults": False})

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Ours)
    (block,) = blocks("sh")
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [words[words.index("--model") + 1] for words in commands] == ["longrecall", "hf"]
    for words in commands:
        assert words[:3] == ["python", "-m", "longrecall.evaluation.harness"]
        monkeypatch.setattr(sys, "argv", words[2:])
        assert main() == 0
        assert "longrecall_phonebook" in capsys.readouterr().out
