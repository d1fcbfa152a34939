"""The losses that layers add (MoM's balance) reach the loss of a training run, through the real loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.training.recipe import Recipe

from .conftest import tiny_model
from .runs import train

MOM = {"type": "mom", "num_heads": 1, "key_dim": 4, "value_dim": 4, "memories": 3}


def test_a_run_trains_on_the_balance_loss(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    first, last = {}, {}
    for balance in (0.0, 1.0, 2.0):
        folder = tmp_path / f"mom{balance}"
        save(tiny_model({**MOM, "balance": balance}), folder, byte_tokenizer(), [])
        names = (f"model.checkpoint={folder}", f"run.output={folder}-out", "run.steps=2", "run.log_every=1")
        rows = train(make_recipe(*names))
        first[balance], last[balance] = rows[0]["loss"], rows[-1]
    added = first[1.0] - first[0.0]
    # Same weights, same data: it is linear in its weight. 1 when the memories are used alike, 3 / 2 when two of three
    # take everything; a router near its initialisation is close to even.
    assert 0.98 < added < 1.1
    # Two losses of about 7, summed in float32 over two micro-batches.
    assert first[2.0] - first[0.0] == pytest.approx(2 * added, abs=1e-5)
    assert last[1.0]["gradient_norm"] != last[0.0]["gradient_norm"]
