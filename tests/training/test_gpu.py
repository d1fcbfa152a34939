from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longrecall.models.checkpoint import open_checkpoint
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_on_a_gpu_learns_and_resumes(make_recipe: Callable[..., Recipe], precision: str) -> None:
    recipe = make_recipe(
        "run.steps=30", "run.save_every=20", f"run.precision={precision}", "optimizer.schedule=constant"
    )
    output = Path(recipe.run.output)
    run_recipe(recipe, show_progress=False)
    losses = [json.loads(line)["loss"] for line in (output / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5  # from ln 258 = 5.55, see test_trainer.py
    final = open_checkpoint(output / "final")
    assert {final.dtype(name) for name in final.names()} == {torch.float32}
    for path in sorted((output / "steps" / "step-00000030").iterdir()):
        path.unlink()
    (output / "steps" / "step-00000030").rmdir()
    assert run_recipe(recipe, resume=True, show_progress=False).resumed_from == 20
    again = [json.loads(line)["loss"] for line in (output / "log.jsonl").read_text().splitlines()]
    assert again[:20] == losses[:20]
    # Sums on a GPU have no fixed order; ten steps of AdamW let that grow to the third digit under fp16.
    assert again[20:] == pytest.approx(losses[20:], rel=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_leash_on_a_gpu(make_recipe: Callable[..., Recipe], base: Path, precision: str) -> None:
    """The model pulls itself by rounding alone, until it has moved."""
    leash = f"leash={{teacher: {base}, sources: [all], hidden: 0.1}}"
    recipe = make_recipe(leash, "run.steps=8", f"run.precision={precision}", "initial_state={kind: zero}")
    run_recipe(recipe, show_progress=False)
    lines = (Path(recipe.run.output) / "log.jsonl").read_text().splitlines()
    pulls = [json.loads(line)["leash_loss"] for line in lines]
    # With gradients and without, kernels may round otherwise: squares of a rounding of 2^-8 at the most.
    assert abs(pulls[0]) < 1e-4 < pulls[-1]
