"""What every recall task shares: the sample, its seed, and tokenising piece by piece so that label spans are exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""Label of a position that is neither trained on nor scored (transformers' convention)."""

CellValue = int | float | str
Cell = Mapping[str, CellValue]

Similarity = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[float]]
"""Passages and a question, both as token ids -> how alike each passage is to the question."""

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
    """A sample whose answer is judged as text: the question in words, and the word that answers it.

    `references`: every answer that counts, where there are several; empty when `target` is the only one. `group`:
    answers of one group (questions about one document) are not independent of each other. `shared`: how many tokens at
    the beginning other samples have too, so that they need to be read only once.
    """

    question: str
    target: str
    references: tuple[str, ...] = ()
    group: str | None = None
    shared: int = 0

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every answer that counts, at least one."""
        return self.references or (self.target,)


@dataclass(frozen=True)
class GradedSample(QuestionSample):
    """A question with `references` that must ALL be given.

    `fill`: the share of the length that was asked for which the prompt and the room kept for the answer take; below 1
    where whole lines or sentences do not fill it.
    """

    fill: float = 1.0


@dataclass(frozen=True)
class ChoiceSample:
    """A prompt with several ways to go on, one of which is right; the likeliest per token is the model's choice.

    `prompt` int64 [T]; `options` int64 [T_i] each, at least two; `answer` the index of the right one. `group` and
    `shared` as in `QuestionSample`; the shared tokens are of the prompt.
    """

    prompt: NDArray[np.int64]
    options: tuple[NDArray[np.int64], ...]
    answer: int
    group: str | None = None
    shared: int = 0


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


_ANCHORS = ("\n", ".", "a")
"""What a piece is put behind to see how it is spelled inside a text: the first that does not merge with it."""


class PieceEncoder:
    """Tokenises small pieces of text one by one and remembers them.

    A sequence is the concatenation of its pieces' tokens, so the tokens of a number are known exactly whatever the
    tokenizer merges elsewhere.

    `opening` is what stands before all pieces: the tokenizer's beginning-of-text token (`bos_token_id`), which a model
    has read before every document of its training; empty where the tokenizer has none.

    `similarity` is how the model that is evaluated compares passages with a question; None where there is no model.
    """

    def __init__(self, tokenizer: TextEncoder, capacity: int = 65536, similarity: Similarity | None = None) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._known: dict[str, tuple[int, ...]] = {}
        self._derived: dict[Hashable, Any] = {}
        self.similarity = similarity
        begin = getattr(tokenizer, "bos_token_id", None)
        self.opening: tuple[int, ...] = () if begin is None else (int(begin),)

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`, without special tokens."""
        ids = self._known.get(text)
        if ids is None:
            (ids,) = self.many([text])
            if len(self._known) >= self._capacity:
                self._known.clear()
            self._known[text] = ids
        return ids

    def many(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, as one call each would, in far less time where the tokenizer can.

        They are not remembered: this is for texts that do not come again, such as random numbers.
        """
        if not self._adds_spaces:
            return self._plain(texts)
        found = self._behind(_ANCHORS[0], texts)
        return [self._alone(text) if tokens is None else tokens for text, tokens in zip(texts, found, strict=True)]

    @cached_property
    def _adds_spaces(self) -> bool:
        """Whether the tokenizer puts a space before every text it is given, as sentencepiece vocabularies do.

        A piece stands in the middle of a text. There it is spelled as behind an anchor, whose tokens are taken off.
        """
        return self._behind(_ANCHORS[0], ["a"])[0] not in (None, self._plain(["a"])[0])

    def _alone(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that merges with the first anchor."""
        for anchor in _ANCHORS[1:]:
            (tokens,) = self._behind(anchor, [text])
            if tokens is not None:
                return tokens
        return self._plain([text])[0]

    def _behind(self, anchor: str, texts: Sequence[str]) -> list[tuple[int, ...] | None]:
        """Return the tokens of each text as it stands behind `anchor`; None where the two merge."""
        (front,) = self._plain([anchor])
        rows = self._plain([anchor + text for text in texts])
        return [row[len(front) :] if row[: len(front)] == front else None for row in rows]

    def _plain(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each text as the tokenizer gives them."""
        if len(texts) > 1 and getattr(self._tokenizer, "is_fast", False) and callable(self._tokenizer):
            rows = self._tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
            )
            return [tuple(row) for row in rows["input_ids"]]
        return [tuple(int(token) for token in self._tokenizer.encode(t, add_special_tokens=False)) for t in texts]

    def spelled(self, tokens: Sequence[int]) -> str | None:
        """Return the text that `tokens` stand for; None where the tokenizer cannot say (it has no `decode`)."""
        decode = getattr(self._tokenizer, "decode", None)
        return None if decode is None else str(decode(list(tokens)))

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
