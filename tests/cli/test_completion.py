"""What a shell is offered at the end of a line, as it asks: a new process with the line in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longrecall.cli.completion import verb_typed
from longrecall.cli.main import VERBS
from longrecall.shipped import shipped_recipes
from longrecall.surgery.registry import METHODS

CODE = """
import sys
from longrecall.cli.main import main
code = main([])
sys.exit(3 if "torch" in sys.modules else code)
"""


def offered(line: str, folder: Path, answers: str = "answers") -> set[str]:
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": answers}
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    subprocess.run([sys.executable, "-c", CODE], cwd=folder, env=os.environ | asked | {"PYTHONPATH": path}, check=True)
    return set((folder / answers).read_text().splitlines())


def test_verbs_options_names_and_files_are_offered(tmp_path: Path) -> None:
    for name in ("model", "notes.txt", "a.json", "own.yaml"):
        (tmp_path / name).mkdir() if name == "model" else (tmp_path / name).touch()
    assert offered("longrecall ", tmp_path) >= {*VERBS, "--version"}
    options = offered("longrecall info --", tmp_path)
    assert {"--json", "--backends"} < options and "--debug" not in options  # it is not told in the help either
    assert offered("longrecall expand model out --method ", tmp_path) == set(METHODS)
    # A list goes on after its last comma, with what is not in it yet.
    assert offered("longrecall eval model --tasks passkey,pas", tmp_path) == {"passkey,passkey_spoken"}
    assert offered("longrecall bench model --dtype b", tmp_path) == {"bfloat16"}
    # Files of the kind that the argument takes; numbers are no files.
    places = offered("longrecall info ", tmp_path)
    assert {"model/", "a.json"} < places and {"notes.txt", "own.yaml"}.isdisjoint(places)
    assert {"model/", "own.yaml", *shipped_recipes(".yaml")} <= offered("longrecall train ", tmp_path)
    assert offered("longrecall eval model --samples ", tmp_path) == set()


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("longrecall ", None),
        ("longrecall eval", None),  # the word under the cursor is not finished
        ("longrecall eval ", "eval"),
        ("longrecall --debug eval model", "eval"),
        ("longrecall 'ev", None),
        ("longrecall eval --text 'my fi", "eval"),
        ("longrecall nonsense ", None),
    ],
)
def test_the_verb_before_the_cursor(line: str, verb: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", f"{line} and what stands behind the cursor")
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert verb_typed(VERBS) == verb
