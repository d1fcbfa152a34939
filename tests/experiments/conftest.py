"""What most tests of docs/retrieval_evidence.md ask for; tests of another page have their own by the same names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from longrecall.sweep.grid import RunSpec, runs_of
from longrecall.sweep.recipe import SweepRecipe
from tests.experiments.retrieval_page import ROOT, experiment, page_prose


class Remembered:
    """Recipes of the repository and their runs, made once: every table asks for the same few, dozens of times."""

    def __init__(self) -> None:
        self._recipes: dict[tuple[Path, tuple[str, ...]], SweepRecipe] = {}
        self._runs: dict[int, list[RunSpec]] = {}

    def load(self, path: Path, overrides: Sequence[str] = ()) -> SweepRecipe:
        if not path.is_relative_to(ROOT / "recipes"):
            return SweepRecipe.load(path, overrides)
        key = path, tuple(overrides)
        if key not in self._recipes:
            self._recipes[key] = SweepRecipe.load(path, overrides)
            self._runs[id(self._recipes[key])] = runs_of(self._recipes[key])
        return self._recipes[key]

    def runs_of(self, recipe: SweepRecipe) -> list[RunSpec]:
        known = self._runs.get(id(recipe))
        return runs_of(recipe) if known is None else list(known)


@pytest.fixture(scope="session")
def remembered() -> Remembered:
    return Remembered()


@pytest.fixture(autouse=True)
def quick_recipes(remembered: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    joins = experiment("join_sweeps", monkeypatch)
    monkeypatch.setattr(joins, "SweepRecipe", remembered)
    monkeypatch.setattr(joins, "runs_of", remembered.runs_of)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """experiments/report_retrieval.py as a module."""
    return experiment("report_retrieval", monkeypatch)


@pytest.fixture
def prose() -> str:
    """docs/retrieval_evidence.md without its tables, as one line."""
    return page_prose()
