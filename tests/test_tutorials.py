"""The tutorials run as their readers run them: each cell of each notebook, from the top, in an empty folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

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
def put_back_what_a_notebook_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    earlier, threads = matplotlib.get_backend(), torch.get_num_threads()
    plt.switch_backend("Agg")
    yield
    plt.close("all")
    plt.switch_backend(earlier)
    torch.set_num_threads(threads)


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_larger_state_recalls_more_than_the_control() -> None:
    shown = run_cells("bigger_memory", {})
    (enlarged, _, _), (control, _, _) = shown["enlarged"][-1], shown["control"][-1]
    assert enlarged > control


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_state_passing_mends_more_than_plain_training() -> None:
    shown = run_cells("past_the_training_length", {})
    before, plain, passed = (shown[name][-1]["loss"] for name in ("before", "plain", "passed"))
    assert passed < plain < before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_larger_state_and_retrieval_recall_more_than_a_small_state() -> None:
    rows = run_cells("retrieval_or_state", {})["rows"]
    small, large, retrieval = (row["tests"] for row in rows.values())
    assert all(s["accuracy"] < x["accuracy"] for s, x in zip(small, large, strict=True))
    assert all(s["accuracy"] < x["accuracy"] for s, x in zip(small, retrieval, strict=True))
