"""Evaluating a checkpoint: load the model and its tokenizer, then `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longrecall.evaluation.engine import create_tasks, describe_model, evaluate
from longrecall.evaluation.parallel import Ranks
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.compiling import compiled_layers
from longrecall.models.loading import load, preferred_device
from longrecall.tasks.registry import Task


def evaluate_checkpoint(
    path: str | Path,
    tasks: Sequence[str | Task],
    lengths: Sequence[int | str],
    samples: int,
    seed: int = 0,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    quantize: str | None = None,
    text: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    ranks: Ranks | None = None,
    compile_layers: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Load the checkpoint at `path` (a folder or a hub id) and `evaluate` it, which explains the other arguments.

    `device` None means CUDA where there is one (with several processes on a machine, one GPU each), else the CPU;
    `dtype` None means as stored; `quantize` is that of `longrecall.load`; `compile_layers` runs the layers through
    torch.compile (UserError without a compiler), which pays for many samples of few lengths. What can be checked
    without the model is checked before it is loaded.
    """
    chosen = create_tasks(tasks, text, options)
    ranks = ranks or Ranks()
    with ranks.claim(out, force=force, resume=resume):
        checkpoint = open_checkpoint(path)
        tokenizer = load_tokenizer(checkpoint.path, checkpoint.config.vocab_size)
        model = load(path, dtype=dtype, device=preferred_device(ranks.device(device)), quantize=quantize)
        about = describe_model(model, str(path), checkpoint.surgery)
        with compiled_layers(model, wanted=compile_layers):
            return evaluate(
                model,
                tokenizer,
                chosen,
                lengths,
                samples,
                seed,
                out=out,
                resume=resume,
                force=force,
                checkpoint=about,
                ranks=ranks,
                **settings,
            )
