"""Fuzzy in-context recall one pair at a time, in plain Python: what the fast generator is compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """What the comparison counts in one row."""

    tokens: int
    """Without padding."""
    pairs: int
    asked: int
    """Value tokens of keys that came before, the closing value included."""
    closing: int
    """Value tokens at the end."""
    shown: bool
    """Whether the row holds the key that it asks for at the end."""
    before: int
    """Tokens before that key stands in the row for the first time; 0 where it does not."""
    short_repeats: int | None
    """How often it stands in the row before the end, where it has one token (so that chance brings it back often)."""


def draw_row(generator: np.random.Generator, length: int, train: bool, published: bool) -> Row:
    """Return one row at 7 key tokens, 8 value tokens, keys and values of up to 3.

    `published`: the probe is not forced into the row, as in the published generator.
    """

    def draw_key() -> tuple[int, ...]:
        size = int(generator.integers(1, 4)) if train else 3
        return tuple(generator.permutation(7)[:size].tolist())

    def draw_value() -> tuple[int, ...]:
        return tuple(generator.permutation(8)[: int(generator.integers(1, 4))].tolist())

    probe, answer = draw_key(), draw_value()
    closing = len(probe) + len(answer)
    place, limit = int(generator.integers(length - 2 * closing)), length - closing - 6
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    tokens = pairs = asked = before = repeats = 0
    while tokens < limit:
        key = draw_key()
        value = answer if key == probe else known.get(key, draw_value())
        last = tokens + len(key) + len(value) >= limit
        if probe not in known and (tokens >= place or (last and not published)):
            key, value = probe, answer
        if key == probe:
            before = before if probe in known else tokens
            repeats += 1
        asked += len(value) if key in known else 0
        known[key] = value
        tokens += len(key) + len(value)
        pairs += 1
    short = repeats if len(probe) == 1 else None
    return Row(tokens + closing, pairs + 1, asked + len(answer), len(answer), probe in known, before, short)
