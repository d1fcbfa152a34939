"""The eight needle tasks: what each hides and asks for, its sentences, and its random keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import draw_integers
from longrecall.tasks.needles.words import ADJECTIVES, NOUNS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORD_KEYS = len(ADJECTIVES) * len(NOUNS)

_HYPHENS = (8, 13, 18, 23)
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
# Drawing distinct keys by trial stays fast while at least half of them are free.
_FULL = WORD_KEYS // 2


@dataclass(frozen=True)
class Kind:
    """One of RULER's tasks: what the haystack is made of, what keys and values are, and how many there are.

    `keys` different keys are hidden, each with `values` values; `queries` of the keys are asked for.
    """

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"]
    value: Literal["numbers", "uuids"]
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def answers(self) -> int:
        """How many values a question asks for."""
        return self.queries * self.values


KINDS: dict[str, Kind] = {
    "niah_single_1": Kind("noise", "words", "numbers"),
    "niah_single_2": Kind("essay", "words", "numbers"),
    "niah_single_3": Kind("essay", "words", "uuids"),
    "niah_multikey_1": Kind("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Kind("needles", "words", "numbers"),
    "niah_multikey_3": Kind("needles", "uuids", "uuids"),
    "niah_multivalue": Kind("essay", "words", "numbers", values=4),
    "niah_multiquery": Kind("essay", "words", "numbers", keys=4, queries=4),
}
"""Task -> what it is (RULER, Hsieh et al. 2024, the configuration that its results are published for)."""


@dataclass(frozen=True)
class Wording:
    """The sentences of a kind, without keys and values: `before` the text; `ask` and `prefix` around the keys."""

    before: str
    needle: str
    ask: str
    mentioned: str
    prefix: str
    last: str


def wording(kind: Kind) -> Wording:
    """Return the sentences of `kind`; a question with one answer is put in the singular, as published."""
    plural = kind.value
    if kind.answers == 1:
        one = plural.removesuffix("s")
        opening, name = f"A special magic {one} is", one
        ask, prefix, last = f"What is the special magic {one} for", f"The special magic {one} for", "is"
    else:
        opening, name = f"Some special magic {plural} are", plural
        ask, prefix, last = f"What are all the special magic {plural} for", f"The special magic {plural} for", "are"
    return Wording(
        before=f"{opening} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {name} afterwards.\n",
        needle=f"One of the special magic {plural} for",
        ask=ask,
        mentioned=" mentioned in the provided text",
        prefix=f" {prefix}",
        last=f" {last}",
    )


def draw_numbers(generator: np.random.Generator, count: int) -> list[str]:
    """Return numbers of seven digits, uniform in [10**6, 10**7)."""
    return [str(number) for number in (draw_integers(generator, 9_000_000, (count,)) + 1_000_000).tolist()]


def draw_uuids(generator: np.random.Generator, count: int) -> list[str]:
    """Return random UUIDs of version 4 (RFC 9562), lower case."""
    digits = draw_integers(generator, 16, (count, 32))
    digits[:, 12] = 4
    digits[:, 16] = 8 + digits[:, 16] % 4
    text: NDArray[np.uint8] = np.full((count, 36), ord("-"), dtype=np.uint8)
    text[:, [place for place in range(36) if place not in _HYPHENS]] = _HEX[digits]
    joined = text.tobytes().decode("ascii")
    return [joined[start : start + 36] for start in range(0, 36 * count, 36)]


def draw_values(generator: np.random.Generator, kind: Kind, count: int) -> list[str]:
    """Return `count` values of `kind`."""
    return draw_uuids(generator, count) if kind.value == "uuids" else draw_numbers(generator, count)


def draw_keys(generator: np.random.Generator, kind: Kind, count: int, taken: set[str]) -> list[str]:
    """Return `count` keys of `kind`, none of them in `taken`, to which they are added.

    Raises `UserError` when so many pairs of words are asked for that they run out.
    """
    if kind.key == "words" and len(taken) + count > _FULL:
        raise UserError(
            f"this length needs more than {_FULL} different needle keys, but pairs of an adjective and a noun give "
            f"only {WORD_KEYS}. Use a shorter length, or niah_multikey_3, whose keys are UUIDs"
        )
    keys: list[str] = []
    while len(keys) < count:
        for key in _candidates(generator, kind, count - len(keys)):
            if key not in taken:
                taken.add(key)
                keys.append(key)
    return keys


def _candidates(generator: np.random.Generator, kind: Kind, count: int) -> list[str]:
    if kind.key == "uuids":
        return draw_uuids(generator, count)
    codes = draw_integers(generator, WORD_KEYS, (count,)).tolist()
    return [f"{ADJECTIVES[code // len(NOUNS)]}-{NOUNS[code % len(NOUNS)]}" for code in codes]


def draw_distinct(generator: np.random.Generator, high: int, count: int) -> list[int]:
    """Return `count` different numbers in [0, high), in random order; `count` must not exceed `high`."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(draw_integers(generator, high, ())[()])] = None
    return list(found)
