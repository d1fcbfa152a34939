"""Whole runs with every intervention: resume, accumulation, checkpointing, documents apart, a model of many mixers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import longrecall
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.losses import label_count
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.data import BatchStream
from longrecall.training.recipe import Recipe
from longrecall.training.segments import Segments, read_batch
from tests.conftest import MIXERS
from tests.training.interventions import OPTIONS, intervene, override
from tests.training.runs import Killed, equal, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]
KINDS = pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind != "zero"])
EVERY = ("gla_conv", "gated_delta_net", "mamba2", "attention_window")


@pytest.fixture
def every_mixer(tmp_path: Path, make_model: Callable[..., RecurrentLM]) -> Path:
    save(make_model(*(MIXERS[name] for name in EVERY)), tmp_path / "every", byte_tokenizer(), [])
    return tmp_path / "every"


@KINDS
def test_a_killed_run_goes_on_bit_for_bit(
    make_recipe: MakeRecipe, every_mixer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """With accumulation, checkpointing and packed documents; killed in the middle of an accumulated step."""
    overrides = [
        f"model.checkpoint={every_mixer}", override(kind), "run.save_every=2", "run.steps=3", "data.context_length=24",
        "run.gradient_checkpointing=true", "data.reset_documents=true", "data.sources.1.pairs=[1, 1]",
    ]  # fmt: skip
    expected = train(make_recipe(*overrides, f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe(*overrides)
    with monkeypatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            train(recipe)
    assert train(recipe, resume=True) == expected
    output = Path(recipe.run.output)
    assert equal(weights(output / "final"), weights(tmp_path / "whole" / "final"))
    assert len({row["loss"] for row in expected}) == 3


@KINDS
def test_a_run_follows_its_micro_batches(make_recipe: MakeRecipe, kind: str) -> None:
    """Accumulated micro-batches follow each other as batches do: the first step by hand, from the same stream."""
    recipe = make_recipe(
        override(kind), "run.steps=1", "optimizer.warmup=0", "run.gradient_accumulation=3", "data.context_length=40"
    )
    (row,) = train(recipe)
    model = longrecall.load(recipe.model.checkpoint, dtype="float32").train()
    initial = intervene(kind, model)
    stream = BatchStream(recipe.data, byte_tokenizer(), 3, continued=kind == "truncated_bptt")
    total, labels = torch.zeros(()), torch.zeros(())
    for _ in range(3):
        batch = stream.next_batch()
        segments = Segments.of(batch["starts"], 40) if initial.continues else None
        mean = read_batch(model, batch["input_ids"], batch["labels"], batch["text"], initial, segments)
        total, labels = total + mean * label_count(batch["labels"]), labels + label_count(batch["labels"])
    # float32 sums of three micro-batches in another order.
    assert row["loss"] == pytest.approx((total / labels).item(), rel=1e-6)


def test_interventions_differ_from_the_second_batch_on(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """No two kinds train the same: a kind that silently does nothing would repeat the losses of zero."""
    kinds = [kind for kind in OPTIONS if kind != "truncated_bptt"]
    losses = set()
    for kind in kinds:
        rows = train(make_recipe(override(kind), "run.steps=2", f"run.output={tmp_path / kind}"))
        losses.add(tuple(row["loss"] for row in rows))
    assert len(losses) == len(kinds)


def test_documents_apart_are_another_training(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    text = "data.sources=[{kind: text, path: " + str(make_recipe().data.sources[0].path) + "}]"
    options = [text, "data.context_length=400", override("zero"), "run.steps=2"]
    joined = train(make_recipe(*options, f"run.output={tmp_path / 'joined'}"))
    apart = train(make_recipe(*options, "data.reset_documents=true", f"run.output={tmp_path / 'apart'}"))
    assert joined[0]["loss"] != apart[0]["loss"]
    # The same tokens and labels: an untrained model differs little.
    assert joined[0]["loss"] == pytest.approx(apart[0]["loss"], rel=1e-2)
