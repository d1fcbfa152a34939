"""What every recall task shares: the sample, its seed, and tokenising piece by piece so that label spans are exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""Label of a position that is neither trained on nor scored (transformers' convention)."""

CellValue = int | float | str
Cell = Mapping[str, CellValue]

_T = TypeVar("_T")


class TextEncoder(Protocol):
    """The part of a transformers tokenizer that the tasks use."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of `text`."""
        ...


class ByteEncoder:
    """The byte tokenizer's encoding, without the tokenizer: one token per UTF-8 byte, nothing opens a text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Bytes of `text`."""
        return list(text.encode())


@dataclass(frozen=True)
class Sample:
    """One sequence with its answers.

    `input_ids` int64 [T]; `labels` int64 [T], equal to `input_ids` on answer tokens and -100 elsewhere (a label
    stands at its own index; the model shifts inside). An answer is a maximal run of labelled tokens.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class QuestionSample(Sample):
    """A sample whose answer is judged as text: the question in words, and the word that answers it."""

    question: str
    target: str


def answer_spans(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [answers, 2]: first and one-past-last index of each maximal run of labels != -100."""
    scored = np.concatenate(([False], labels != IGNORE, [False]))
    edges = np.flatnonzero(scored[1:] != scored[:-1])
    return edges.reshape(-1, 2).astype(np.int64)


def cell_key(task: str, cell: Cell) -> str:
    """Return one stable string per (task, cell), e.g. ``phonebook {"distance":0,"pairs":8}``."""
    return f"{task} {json.dumps(dict(cell), sort_keys=True, separators=(',', ':'))}"


def sample_generator(seed: int, task: str, cell: Cell, index: int) -> np.random.Generator:
    """Return the generator of sample `index`: the same on every platform, independent between samples."""
    digest = hashlib.sha256(f"{seed} {index} {cell_key(task, cell)}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def draw_integers(generator: np.random.Generator, high: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return integers in [0, high) as int64 of `shape`.

    Made from `random()` alone: numpy promises the bit stream of its doubles, but may change how `integers()` uses it.
    """
    return np.asarray(np.floor(generator.random(shape) * high), dtype=np.int64)


class PieceEncoder:
    """Tokenises small pieces of text one by one and remembers them.

    A sequence is the concatenation of its pieces' tokens, so the tokens of a number are known exactly whatever the
    tokenizer merges elsewhere.

    `opening` is what stands before all pieces: the tokenizer's beginning-of-text token (`bos_token_id`), which a model
    has read before every document of its training; empty where the tokenizer has none.
    """

    def __init__(self, tokenizer: TextEncoder, capacity: int = 65536) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._known: dict[str, tuple[int, ...]] = {}
        self._derived: dict[Hashable, Any] = {}
        begin = getattr(tokenizer, "bos_token_id", None)
        self.opening: tuple[int, ...] = () if begin is None else (int(begin),)

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`, without special tokens."""
        ids = self._known.get(text)
        if ids is None:
            ids = tuple(int(token) for token in self._tokenizer.encode(text, add_special_tokens=False))
            if len(self._known) >= self._capacity:
                self._known.clear()
            self._known[text] = ids
        return ids

    def derived(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return ``make()``, kept under `key`: for what takes long to tokenise and serves many samples, such as a book.

        Whatever else the result depends on belongs into `key`.
        """
        if key not in self._derived:
            self._derived[key] = make()
        result: _T = self._derived[key]
        return result

    def answer(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split the tokens of ``" " + text`` into (a leading token that is only the space, the answer's tokens).

        A byte or digit tokenizer gives the space its own token, which belongs to the prompt; one that merges the
        space into the first token of the number (`" 42"`) yields an empty first part.
        """
        space, both = self(" "), self(" " + text)
        if both[: len(space)] == space and len(both) > len(space):
            return space, both[len(space) :]
        return (), both
