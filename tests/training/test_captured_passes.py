"""Passes of training steps that are recorded as CUDA graphs: the same numbers, and when they are not recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.layers.experts import Experts
from longrecall.layers.mixers.mom import MoM
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training import captured_passes
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from tests.conftest import MIXERS

ZERO = "initial_state={kind: zero}"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all steps and the final weights."""
    run_recipe(recipe, force=True, show_progress=False)
    output = Path(recipe.run.output)
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    final = open_checkpoint(output / "final")
    return [line["loss"] for line in lines if "loss" in line], {name: final.read(name) for name in final.names()}


def both_ways(make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Assert that recorded steps change nothing; return how many recordings were made."""
    made: list[Any] = []
    recorded = captured_passes._recorded

    def counted(*arguments: Any) -> Any:
        made.append(None)
        return recorded(*arguments)

    monkeypatch.setattr(captured_passes.CapturedPasses.__init__, "__defaults__", (3, True, counted))
    expected = run(make_recipe("run.steps=10", "run.cuda_graphs=false", *overrides))
    assert not made
    found = run(make_recipe("run.steps=10", *overrides))
    # The same kernels with the same arguments, none of which adds up in an order of chance.
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], x) for name, x in expected[1].items())
    return len(made)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("overrides", "recordings"),
    [
        # State passing: the first batch, without a state, comes once; with one, the first and the last micro-batch of
        # a step differ.
        ((), 2),
        ((ZERO, "run.gradient_accumulation=1"), 1),
        ((ZERO, "run.gradient_accumulation=3", "run.precision=bf16"), 3),
        (("initial_state={kind: noise, std: 0.1}", "run.gradient_checkpointing=true"), 2),
        # Evaluation takes the recordings' memory, and they are made anew.
        (
            (
                ZERO,
                "run.gradient_accumulation=1",
                "evaluation={every: 6, held_out: {tokens: 96, sources: [{kind: phonebook, pairs: [2, 2]}]}}",
            ),
            2,
        ),
        (("data.reset_documents=true",), 0),
        (("initial_state={kind: learned}",), 0),
        (("run.precision=fp16",), 0),
    ],
    ids=str,
)
def test_recorded_steps_are_the_same(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], recordings: int
) -> None:
    assert both_ways(make_recipe, monkeypatch, *overrides) == recordings


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", list(MIXERS))
def test_every_mixer_is_recorded(
    name: str, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[name], "mlp_size": 24}] * 2
    model = RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=32, layers=layers))
    save(model, tmp_path / "one", byte_tokenizer())
    options = (f"model.checkpoint={tmp_path / 'one'}", "run.gradient_accumulation=1", "optimizer.touched=1x")
    host = any(isinstance(module, (Experts, MoM)) for module in model.modules())
    assert both_ways(make_recipe, monkeypatch, *options) == (0 if host else 1)
