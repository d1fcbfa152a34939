"""The tutorials run as their readers run them: each cell of each notebook, from the top, in an empty folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from docs.tutorials.build_notebooks import FOLDER, SCRIPTS, notebook

QUICK: dict[str, dict[str, Any]] = {
    "bigger_memory": {"STEPS": 1, "SAMPLES": 2},
    "past_the_training_length": {"STEPS": 1, "LENGTH": 32, "MULTIPLE": 4, "WINDOWS": 2},
    "retrieval_or_state": {"EPOCHS": 1, "ROWS": 64, "TEST_ROWS": 4},
}
"""What stands in the parameter cells when only the cells themselves are tested."""
NAMES = [script.stem for script in SCRIPTS]


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


def run_cells(name: str, instead: dict[str, Any]) -> dict[str, Any]:
    """Run the code of a notebook; `instead` replaces values of its parameter cell, as papermill would."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(name):
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), f"{name}.ipynb, {cell['id']}", "exec"), namespace)
        if "parameters" in cell["metadata"].get("tags", []):
            assert instead.keys() <= namespace.keys(), "the test names a parameter that the notebook does not have"
            namespace.update(instead)
    return namespace


@pytest.fixture(autouse=True)
def without_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    earlier = matplotlib.get_backend()
    plt.switch_backend("Agg")
    yield
    plt.close("all")
    plt.switch_backend(earlier)


def plot_of(namespace: dict[str, Any]) -> Path:
    (plot,) = Path(namespace["FOLDER"]).glob("*.svg")
    return plot


def test_each_tutorial_has_its_quick_values() -> None:
    assert list(QUICK) == NAMES and len(NAMES) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_script_becomes(name: str) -> None:
    built = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert built == notebook(FOLDER / f"{name}.py"), "run python docs/tutorials/build_notebooks.py"


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_a_file(name: str) -> None:
    text = "".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)\)", text)
    assert links and all((FOLDER / link).is_file() for link in links)


@pytest.mark.parametrize("name", NAMES)
def test_each_cell_of_a_tutorial_runs(name: str) -> None:
    assert plot_of(run_cells(name, QUICK[name])).stat().st_size > 1000
