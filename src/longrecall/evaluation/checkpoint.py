"""Evaluating a checkpoint: load the model and its tokenizer, then `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError
from longrecall.evaluation.engine import create_tasks, describe_model, evaluate
from longrecall.evaluation.parallel import Ranks
from longrecall.files import check_writable
from longrecall.models.byte_tokenizer import VOCABULARY, byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.compiling import compiled_layers
from longrecall.models.loading import load, preferred_device
from longrecall.tasks.registry import Task

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_tokenizer(folder: str | Path, vocabulary: int) -> Any:
    """Return the tokenizer of a checkpoint folder; without its files, the byte tokenizer if `vocabulary` fits it.

    Raises `UserError` when there is none, or when its files cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        if vocabulary != VOCABULARY:
            raise UserError(f"{folder} has no tokenizer files; copy tokenizer.json of the original model into it")
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load the tokenizer in {folder}: {reason}") from error


def evaluate_checkpoint(
    path: str | Path,
    tasks: Sequence[str | Task],
    lengths: Sequence[int | str],
    samples: int,
    seed: int = 0,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    text: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    ranks: Ranks | None = None,
    compile_layers: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Load the checkpoint at `path` (a folder or a hub id) and `evaluate` it, which explains the other arguments.

    `device` None means CUDA where there is one (with several processes on a machine, one GPU each), else the CPU;
    `dtype` None means as stored; `compile_layers` runs the layers through torch.compile (UserError without a compiler),
    which pays for many samples of few lengths. What can be checked without the model is checked before it is loaded.
    """
    chosen = create_tasks(tasks, text, options)
    if out is not None:
        check_writable(out)
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config.vocab_size)
    device = (ranks or Ranks()).device(device)
    model = load(path, dtype=dtype, device=preferred_device(device))
    about = describe_model(model, str(path), checkpoint.surgery)
    with compiled_layers(model, wanted=compile_layers):
        return evaluate(
            model, tokenizer, chosen, lengths, samples, seed, out=out, checkpoint=about, ranks=ranks, **settings
        )
