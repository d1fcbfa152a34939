"""Model descriptions: a config.json for people, in which equal layers are written once, and fresh models made of it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError, did_you_mean
from longrecall.files import expand_home
from longrecall.models.byte_tokenizer import VOCABULARY, byte_tokenizer
from longrecall.models.checkpoint import CheckpointWriter
from longrecall.models.checkpoint_tokenizer import read_tokenizer
from longrecall.models.config import RecurrentConfig
from longrecall.models.formats import native
from longrecall.models.formats.weights import read_json
from longrecall.models.limits import LAYERS, check_memory, check_numbers
from longrecall.models.recurrent_lm import RecurrentLM

BYTES = "bytes"
"""The name of the embedded tokenizer."""

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json")
"""What a folder holds of a tokenizer."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_CHECKPOINTS = ("architectures", "dtype", "transformers_version")
"""What the config.json of a written checkpoint says beside the model: a description may, and it changes nothing."""


def is_description(path: str | Path) -> bool:
    """Whether `path` means a description (a .json file) and not a checkpoint."""
    return str(path).endswith(".json") and not Path(path).is_dir()


def read_description(path: str | Path) -> RecurrentConfig:
    """Return the config that a description file means.

    It is a native config.json (docs/architecture.md) whose layers may carry ``"repeat": N``: N equal layers in a row.

    Raises:
        UserError: a file that is missing or no JSON, an unknown or missing key, or a value that cannot be.
    """
    path = expand_home(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}; a model description is a .json file, see recipes/configs/")
    raw, where = read_json(path), str(path)
    fields = inspect.signature(RecurrentConfig.__init__).parameters.keys() - {"self", "kwargs"}
    known = {*fields, "model_type", *_TOKENS, *_OF_CHECKPOINTS}
    for key in raw:
        if key not in known:
            raise UserError(f'{where}: a model description has no key "{key}".{did_you_mean(key, known)} Leave it out')
    if raw.get("model_type", native.MODEL_TYPE) != native.MODEL_TYPE:
        raise UserError(f'{where}: "model_type" is {raw["model_type"]!r}; a model description is "{native.MODEL_TYPE}"')
    return native.layout({**raw, "layers": _repeated(raw.get("layers"), where)}, where).config


def _repeated(layers: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise UserError(f'{where}: "layers" must be a list of layer descriptions')
    found: list[dict[str, Any]] = []
    for layer in layers:
        count = layer.get("repeat", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= LAYERS:
            raise UserError(f'{where}: "repeat" must be a whole number from 1 to {LAYERS}, got {count!r}')
        if len(found) + count > LAYERS:
            raise UserError(f'{where}: "layers" are more than {LAYERS} with their "repeat"')
        found += [{key: value for key, value in layer.items() if key != "repeat"}] * count
    return found


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
