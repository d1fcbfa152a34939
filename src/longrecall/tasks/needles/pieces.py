"""Needles, questions and sentences as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.needles.wording import Kind, Wording, draw_uuids, draw_values, wording
from longrecall.tasks.needles.words import ADJECTIVES, NOUNS
from longrecall.tasks.text import split_sentences

Ints = NDArray[np.int64]
Tokens = tuple[int, ...]

_MEASURED = 512
"""Random values (and UUID keys) whose tokens are counted to know how long one can be."""


def array(tokens: Sequence[int]) -> Ints:
    """Return the tokens as int64 [T]."""
    return np.array(tokens, dtype=np.int64)


def key_tokens(encode: PieceEncoder, kind: Kind, keys: Sequence[str]) -> list[Tokens]:
    """Return the tokens of each key with the space before it."""
    if kind.key == "uuids":
        return encode.many([f" {key}" for key in keys])
    # Two halves from short lists: they are remembered, where hundreds of thousands of pairs could not be.
    halves = (key.split("-") for key in keys)
    return [encode(f" {adjective}") + encode(f"-{noun}") for adjective, noun in halves]


@dataclass(frozen=True)
class Widest:
    """Most tokens of a key and of a value, each with the space before it."""

    key: int
    value: int


def check_spelling(encode: PieceEncoder, name: str, value: str, tokens: Tokens) -> None:
    """Raise `UserError`, which begins with the task's `name`, when decoding does not give a value back.

    No answer could ever be right then.
    """
    back = encode.spelled(tokens)
    if back is not None and value.casefold() not in back.casefold():
        raise UserError(
            f'{name}: the tokenizer cannot represent the needle "{value}": it turns it into {back!r}; use a '
            "task with other values, or the tokenizer that belongs to the model"
        )


def widest(encode: PieceEncoder, kind: Kind, name: str) -> Widest:
    """Return how many tokens keys and values can take: exact for words, measured on random numbers and UUIDs.

    Raises `UserError` when the tokenizer cannot represent some of these values.
    """

    def measure() -> Widest:
        generator = np.random.Generator(np.random.PCG64(0))
        drawn = draw_values(generator, kind, _MEASURED)
        values = encode.many([f" {value}" for value in drawn])
        for value, tokens in zip(drawn, values, strict=True):
            check_spelling(encode, name, value, tokens)
        if kind.key == "uuids":
            key = max(map(len, encode.many([f" {key}" for key in draw_uuids(generator, _MEASURED)])))
        else:
            key = max(len(encode(f" {word}")) for word in ADJECTIVES) + max(len(encode(f"-{word}")) for word in NOUNS)
        return Widest(key, max(map(len, values)))

    return encode.derived(("needle sizes", kind.key, kind.value), measure)


class Frame:
    """The sentences of one kind as tokens: what stands around the haystack, and needles in both their forms."""

    def __init__(self, encode: PieceEncoder, kind: Kind, name: str, opening: bool) -> None:
        self._encode, self._kind, self._name = encode, kind, name
        self._words: Wording = wording(kind)
        self._end = encode(".") if kind.haystack == "essay" else encode(".\n")
        self.before: Tokens = (encode.opening if opening else ()) + encode(self._words.before)

    def needles(self, keys: Sequence[str], values: Sequence[str], spaced: bool) -> list[Tokens]:
        """Return the needle of each (key, value); `spaced`: with a space before its first word."""
        encode = self._encode
        start, between = encode(" " * spaced + self._words.needle), encode(" is:")
        said = encode.many([f" {value}" for value in values])
        named = key_tokens(encode, self._kind, keys)
        return [start + key + between + value + self._end for key, value in zip(named, said, strict=True)]

    def asks(self, keys: Sequence[str]) -> str:
        """Return the question in words."""
        listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        return f"{self._words.ask} {listed}{self._words.mentioned}?"

    def question(self, keys: Sequence[str], lead: Tokens) -> Tokens:
        """Return what follows the haystack: the question, the beginning of the answer, and `lead`."""
        encode, words = self._encode, self._words
        named = self._listed(key_tokens(encode, self._kind, keys))
        ask = ("\n" if self._kind.haystack == "essay" else "") + words.ask
        asked = encode(ask) + named + encode(words.mentioned) + encode("?")
        return asked + encode(words.prefix) + named + encode(words.mentioned) + encode(words.last) + lead

    def answer(self, values: Sequence[str]) -> tuple[Tokens, Tokens]:
        """Return (the space before the answer where it is a token of its own, the answer: values joined by commas).

        Raises `UserError` as `check_spelling` does.
        """
        for value in values:
            check_spelling(self._encode, self._name, value, sum(self._encode.answer(value), ()))
        return self._encode.answer(", ".join(values))

    def smallest(self) -> int:
        """Return how many tokens the prompt takes without a haystack, whatever the draws."""
        kind, encode, size = self._kind, self._encode, widest(self._encode, self._kind, self._name)
        start = max(len(encode(self._words.needle)), len(encode(f" {self._words.needle}")))
        needle = start + size.key + len(encode(" is:")) + size.value + len(self._end)
        words = "acorn-acorn" if kind.key == "words" else "0" * 36
        listed = key_tokens(encode, kind, [words])[0]
        # A question names its keys twice; the space before the answer may be a token of its own.
        around = len(self.question([words] * kind.queries, encode(" ")))
        keys = 2 * kind.queries * (size.key - len(listed))
        return len(self.before) + kind.keys * kind.values * needle + around + keys

    def _listed(self, keys: Sequence[Tokens]) -> Tokens:
        encode = self._encode
        listed = keys[0]
        for place, key in enumerate(keys[1:], start=2):
            listed = listed + encode(", and" if place == len(keys) else ",") + key
        return listed


@dataclass(frozen=True)
class Essay:
    """A text as sentences, each with a space before it: `tokens` int64 [n], `starts` int64 [sentences + 1].

    `first`: the first sentence without that space, int64.
    """

    tokens: Ints
    starts: Ints
    first: Ints

    @property
    def sentences(self) -> int:
        """How many sentences the text has."""
        return len(self.starts) - 1

    def most(self, room: int) -> int:
        """Return the most sentences from the beginning, the text repeated where it ends, that take `room` tokens."""
        rounds, rest = divmod(max(room, 0), len(self.tokens))
        return rounds * self.sentences + int(np.searchsorted(self.starts, rest, side="right")) - 1

    def offset(self, sentence: int) -> int:
        """Return how many tokens stand before `sentence`, counted through repetitions."""
        rounds, rest = divmod(sentence, self.sentences)
        return rounds * len(self.tokens) + int(self.starts[rest])

    def take(self, start: int, end: int) -> Ints:
        """Return the tokens from `start` to `end`, counted through repetitions."""
        return np.take(self.tokens, np.arange(start, end), mode="wrap")


def essay(encode: PieceEncoder, text: str) -> Essay:
    """Return the sentences of a text as tokens, made once per encoder; raise `UserError` when it has none."""
    return encode.derived(("needle essay", text), lambda: _essay(encode, text))


def _essay(encode: PieceEncoder, text: str) -> Essay:
    sentences = split_sentences(text)
    kept = [(s, row) for s, row in zip(sentences, encode.many([f" {s}" for s in sentences]), strict=True) if row]
    if not kept:
        raise UserError("the haystack text has no words that the tokenizer knows; give running text")
    sizes = np.array([len(row) for _, row in kept], dtype=np.int64)
    return Essay(
        np.concatenate([array(row) for _, row in kept]),
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        array(encode(kept[0][0])),
    )
