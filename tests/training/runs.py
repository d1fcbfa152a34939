"""What the tests of whole runs share: run, read what it left, kill it half-way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.models.checkpoint import open_checkpoint
from longrecall.training.data import BatchStream
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe


class Killed(BaseException):
    """Ends a run from inside, like a signal: no handler for errors sees it."""


def train(recipe: Recipe, **options: Any) -> list[dict[str, Any]]:
    run_recipe(recipe, show_progress=False, **options)
    rows = [json.loads(line) for line in (Path(recipe.run.output) / "log.jsonl").read_text().splitlines()]
    # The speed of the machine is no part of a run's result.
    return [{key: row[key] for key in row if key not in ("tokens_per_second", "data_wait")} for row in rows]


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kill_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Let the stream die when batch number `batches` (0-based) of the training is asked for."""
    original, count = BatchStream.__iter__, iter(range(10_000))

    def dying(self: BatchStream) -> Any:
        for batch in original(self):
            if next(count) == batches:
                raise Killed
            yield batch

    monkeypatch.setattr(BatchStream, "__iter__", dying)
