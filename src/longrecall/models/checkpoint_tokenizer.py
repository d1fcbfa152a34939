"""The tokenizer of a checkpoint, read without ever running code that comes with a checkpoint.

A checkpoint may name Python files of its own (``auto_map`` in tokenizer_config.json or config.json), and transformers
offers to run them. longrecall never does: it reads the tokenizers that transformers knows, and refuses the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.models.byte_tokenizer import VOCABULARY, byte_tokenizer
from longrecall.models.formats.descriptions import read_json
from longrecall.models.formats.hub import locate_tokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_CONFIG = "tokenizer_config.json"
_NEVER = "code that comes with a checkpoint is never run"


def load_tokenizer(place: str | Path, vocabulary: int) -> Any:
    """Return the tokenizer of a checkpoint folder or hub id; without its files, the byte tokenizer if it fits.

    Args:
        place: the checkpoint.
        vocabulary: rows of the model's embedding.

    Raises:
        UserError: there is none, its files cannot be read or ask for code, or the model has fewer tokens than it.
    """
    folder = locate_tokenizer(place)
    if not any((folder / name).exists() for name in _FILES):
        if vocabulary != VOCABULARY:
            raise UserError(f"{folder} has no tokenizer files; copy tokenizer.json of the original model into it")
        return byte_tokenizer()
    tokenizer = read_tokenizer(folder)
    # Tokens added later (a padding token, say) may lie beyond: they occur only in texts that spell them out.
    size = getattr(tokenizer, "vocab_size", 0)
    if size > vocabulary:
        raise UserError(f"the tokenizer in {folder} has {size} tokens, but the model only {vocabulary}")
    return tokenizer


def read_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer whose files are in `folder`, as a class of transformers.

    Raises:
        UserError: the files cannot be read, or they ask for code that comes with them; one line names the file.
    """
    folder = expand_home(folder)
    _refuse_code(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot load the tokenizer in {folder}: {reason}") from error


def _refuse_code(folder: Path) -> None:
    """Raise UserError when the tokenizer is a class that only a file of the checkpoint defines.

    With a class of transformers beside it, ``auto_map`` is another way to the same tokenizer, and is not followed.
    """
    for name in (_CONFIG, "config.json"):
        if not (folder / name).is_file():
            continue
        settings = read_json(folder / name)
        code = _named_code(settings.get("auto_map"))
        if code is not None and not _is_known(settings.get("tokenizer_class")):
            raise UserError(
                f"{folder / name}: the tokenizer needs its own Python code ({code}), and {_NEVER}. Put a "
                'tokenizer.json there that needs none, remove "auto_map" from the file, and set "tokenizer_class" in '
                f'{_CONFIG} to "PreTrainedTokenizerFast"'
            )
        if settings.get("tokenizer_class") is not None:
            return  # then config.json has no say in it


def _named_code(auto_map: object) -> str | None:
    """Return what ``auto_map`` names for a tokenizer: a mapping of Auto classes, or (the old way) the names alone."""
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
    names = named if isinstance(named, list | tuple) else [named]
    return next((f'"auto_map": {name!r}' for name in names if name is not None), None)


def _is_known(name: object) -> bool:
    """Whether transformers itself has a tokenizer class of this name."""
    import transformers

    if not isinstance(name, str):
        return False
    found = (getattr(transformers, spelling, None) for spelling in (name, name + "Fast", name.removesuffix("Fast")))
    return any(isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerBase) for kind in found)


@contextmanager
def without_checkpoint_code() -> Iterator[None]:
    """Keep other people's code from running a checkpoint's inside the block, whatever it asks transformers for.

    Tasks of lm-evaluation-harness read the tokenizer of the model under test with ``trust_remote_code=True``.
    """
    from transformers import AutoConfig, AutoTokenizer, dynamic_module_utils

    def refuse(class_name: str, *_: Any, **__: Any) -> Any:
        raise UserError(f'the class "{class_name}" is code of a checkpoint, and {_NEVER}')

    replaced: list[tuple[Any, str, Any]] = [
        (auto, "from_pretrained", staticmethod(_distrusting(auto.from_pretrained)))
        for auto in (AutoConfig, AutoTokenizer)
    ]
    # Where every Auto class of transformers ends up that is to run a file of a checkpoint.
    replaced.append((dynamic_module_utils, "get_class_in_module", refuse))
    before = [vars(owner)[name] for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name, _), function in zip(replaced, before, strict=True):
            setattr(owner, name, function)


def _distrusting(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(*args: Any, **options: Any) -> Any:
        return load(*args, **{**options, "trust_remote_code": False})

    return call
