"""Fresh models of a description, as native checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.models.byte_tokenizer import VOCABULARY, byte_tokenizer
from longrecall.models.checkpoint import CheckpointWriter
from longrecall.models.checkpoint_tokenizer import read_tokenizer
from longrecall.models.config import RecurrentConfig
from longrecall.models.limits import check_memory, check_numbers
from longrecall.models.recurrent_lm import RecurrentLM

BYTES = "bytes"
"""The name of the embedded tokenizer."""

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json")
"""What a folder holds of a tokenizer."""


def initialise(
    config: RecurrentConfig,
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: str | Path | None = None,
    force: bool = False,
) -> None:
    """Write a fresh model of `config` as a native checkpoint.

    Args:
        config: the model's; see `read_description`.
        folder: where to; complete at the end or not there.
        seed: of every number; the global random state is left as it was.
        dtype: storage type of the weights.
        tokenizer: a folder whose tokenizer files are copied, "bytes" for the embedded one, None = the embedded one when
            the vocabulary is its own, else none.
        force: replace a non-empty folder.

    Raises:
        UserError: a folder that cannot be written, or a tokenizer that is not there or larger than the vocabulary.
    """
    numbers = check_numbers(config.tensor_shapes().values(), "the model")
    check_memory(numbers * max(dtype.itemsize, torch.get_default_dtype().itemsize), "the model")
    files, embedded = _tokenizer(config, tokenizer)
    with CheckpointWriter(folder, force=force) as writer:
        writer.set_config(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tensors = RecurrentLM(config).state_dict()
        for name in config.tensor_shapes():
            tensor = tensors.pop(name)
            writer.add(name, tensor if name.endswith(".progress") else tensor.to(dtype))
        writer.add_companions(files)
        if embedded:
            byte_tokenizer().save_pretrained(str(writer.folder))


def _tokenizer(config: RecurrentConfig, tokenizer: str | Path | None) -> tuple[list[Path], bool]:
    """Return the files to copy, and whether the embedded tokenizer is to be written."""
    if tokenizer is None:
        return [], config.vocab_size == VOCABULARY
    if str(tokenizer) == BYTES:
        if config.vocab_size < VOCABULARY:
            raise UserError(f"the byte tokenizer has {VOCABULARY} tokens, the model only {config.vocab_size}")
        return [], True
    folder = expand_home(tokenizer)
    files = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not files:
        raise UserError(f"{folder} holds no tokenizer files; give a checkpoint folder, or {BYTES}")
    size = len(read_tokenizer(folder))
    if size > config.vocab_size:
        raise UserError(f"the tokenizer in {folder} has {size} tokens, the model only {config.vocab_size}")
    return files, False
