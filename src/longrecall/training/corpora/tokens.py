"""Token files: documents that have been tokenised once (`longrecall tokenize`), mapped into memory.

A folder: ``00000.tokens`` (uint16 or uint32, little-endian, document after document, each with its end token),
``00000.starts`` (int64 ``[documents + 1]``: where each document starts, and where the last one ends) and so on for each
shard; ``tokens.json`` says what they are and which tokenizer made them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.training.corpora.base import Pieces, unreadable

INDEX_FILE = "tokens.json"
TOKENS, STARTS = ".tokens", ".starts"
STARTS_TYPE = np.dtype("<i8")
TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def token_type(vocabulary: int) -> str:
    """Return the type of the ids of a vocabulary of this size."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def read_index(folder: Path) -> dict[str, Any]:
    """Return what ``tokens.json`` says; UserError when it is missing or says something else."""
    path = folder / INDEX_FILE
    again = "write the folder again with longrecall tokenize"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not a folder of token files: it has no {INDEX_FILE}; {again}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}; {again}") from None
    try:
        if index["kind"] != "tokens" or index["schema"] != 1 or index["dtype"] not in TYPES:
            raise KeyError
        named = [(str(shard["name"]), int(shard["documents"]), int(shard["tokens"])) for shard in index["shards"]]
        if not named or any(Path(name).name != name for name, _, _ in named):
            raise KeyError
        str(index["tokenizer"]["fingerprint"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is not an index of token files that this version reads; {again}") from None
    return dict(index)


class TokensCorpus:
    """A folder of token files; a chunk holds the documents that start in `chunk_tokens` tokens of a shard.

    What is in memory is a map of the files: any document is there at once.

    Args:
        path: the folder.
        fingerprint: of the tokenizer that the model has.

    Raises:
        UserError: no such folder, a shard that is missing or shorter than the index says, another tokenizer.
    """

    streamed = False

    def __init__(self, path: str, chunk_tokens: int, fingerprint: str) -> None:
        self._folder = expand_home(path)
        index = read_index(self._folder)
        if index["tokenizer"]["fingerprint"] != fingerprint:
            raise UserError(
                f"{self._folder} was made with another tokenizer than the checkpoint's; make it again with "
                "longrecall tokenize --tokenizer and this checkpoint"
            )
        self._type = TYPES[index["dtype"]]
        self._shards = [(shard["name"], shard["documents"], shard["tokens"]) for shard in index["shards"]]
        for name, documents, tokens in self._shards:
            self._check_size(name + TOKENS, tokens * self._type.itemsize)
            self._check_size(name + STARTS, (documents + 1) * STARTS_TYPE.itemsize)
        self._pieces = Pieces([tokens for _, _, tokens in self._shards], chunk_tokens)
        self._maps: dict[str, NDArray[Any]] = {}

    def _check_size(self, name: str, size: int) -> None:
        path = self._folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise unreadable(path, error) from None
        if found != size:
            raise UserError(f"{path} has {found} bytes, not {size}: it is cut short or replaced; copy or make it again")

    def __len__(self) -> int:
        return len(self._pieces)

    def _map(self, name: str, kind: np.dtype[Any]) -> NDArray[Any]:
        if name not in self._maps:
            try:
                self._maps[name] = np.memmap(self._folder / name, dtype=kind, mode="r")
            except (OSError, ValueError) as error:
                raise UserError(f"{self._folder / name} cannot be read: {error}") from None
        return self._maps[name]

    def _span(self, chunk: int) -> tuple[str, NDArray[Any], int, int]:
        """Return the shard of a chunk, where its documents start, and the numbers of the first and last + 1."""
        file, start, end = self._pieces.locate(chunk)
        name = self._shards[file][0]
        starts = self._map(name + STARTS, STARTS_TYPE)
        first, last = (int(place) for place in np.searchsorted(starts[:-1], (start, end)))
        return name, starts, first, last

    def size(self, chunk: int) -> int:
        """Return the number of documents."""
        _, _, first, last = self._span(chunk)
        return last - first

    def read(
        self, chunk: int, start: int | None = None, part: int = 0, parts: int = 1
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Give the documents of a chunk as ids, parts of the mapped file."""
        name, starts, first, last = self._span(chunk)
        tokens = self._map(name + TOKENS, self._type)
        for number in range(start or 0, last - first):
            if number % parts == part:
                begin, end = int(starts[first + number]), int(starts[first + number + 1])
                if not 0 <= begin <= end <= len(tokens):
                    raise UserError(f"{self._folder / name}{STARTS} is damaged at document {first + number}")
                yield number, tokens[begin:end]

    def describe(self, chunk: int) -> str:
        file, start, end = self._pieces.locate(chunk)
        return f"{self._folder / self._shards[file][0]}{TOKENS} tokens {start}-{end}"

    def amount(self) -> list[int]:
        return [len(self._shards), sum(tokens for _, _, tokens in self._shards)]
