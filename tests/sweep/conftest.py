"""A sweep of four runs that takes two seconds: two mixers, two learning rates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from longrecall.sweep.grid import RunSpec, runs_of
from longrecall.sweep.recipe import SweepRecipe

TINY: dict[str, Any] = {
    "tasks": [{"name": "mqar", "settings": {"vocab_size": 16, "length": 8, "pairs": 2}}],
    "models": {"mixers": ["gla", "retnet"], "hidden_sizes": [8], "layers": 1},
    # 21 examples: the last batch of an epoch has 5 of 8.
    "training": {"epochs": 2, "learning_rates": [0.003, 0.01], "batch_size": 8},
    "data": {"train": 21, "test": 10},
    "run": {"output": "out.json", "device": "cpu"},
}


@pytest.fixture
def tiny() -> dict[str, Any]:
    return copy.deepcopy(TINY)


@pytest.fixture
def write(tmp_path: Path, tiny: dict[str, Any]) -> Callable[..., Path]:
    """Write the tiny recipe with sections replaced; its output lies beside it."""

    def write_recipe(name: str = "recipe", **sections: Any) -> Path:
        recipe = {**tiny, **sections}
        recipe["run"] = {**recipe["run"], "output": str(tmp_path / f"{name}.json")}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    return write_recipe


@pytest.fixture
def make_spec(tiny: dict[str, Any]) -> Callable[..., RunSpec]:
    """The first run of the tiny recipe with ``a.b=value`` on top."""

    def make(*overrides: str) -> RunSpec:
        return runs_of(SweepRecipe.from_dict(tiny, overrides))[0]

    return make
