r"""Fuzzy in-context recall of the MAD suite: keys and values of one to three tokens, with nothing between them.

A test row with `length` 26, vocabulary 16 (key tokens 0 to 6, value tokens 7 to 14, padding 15); the keys are 1 4 5,
0 3 2 and the probe 5 4 0, whose value is asked for at the end; ``.`` is a label of -100:

    ids    15 15 15 15 15 15  1  4  5  8 10 12  0  3  2  9 14  5  4  0 14  9  5  4  0 14
    labels  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  . 14  9

Source: Poli et al. (2024), as in the published settings and code. The length of a key or a value is uniform; in a
test every key has the full length. Tokens are distinct within a key or value. A key that was seen keeps its value. One
pair, the probe, is drawn first; it stands somewhere in the row, and its key and value end the row. Pairs are added
while fewer tokens than ``length - probe - longest pair`` are there; the rest is padding on the left. In training every
next token is a label, padding too; in a test the values of keys that came before.

One difference: the published generator sometimes ends a row before it has shown the probe, and then asks for a value
that nobody can know. Here the probe takes the place before the last pair at the latest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import IGNORE, draw_integers
from longrecall.tasks.mad.pairs import CHUNK, first_occurrence
from longrecall.tasks.sequences import Batch, Ints, Readout, Split, check_at_least, draw_distinct
from longrecall.tasks.wording import Wording


@dataclass(frozen=True)
class _Pairs:
    """Pairs of rows, column 0 the probe: tokens int64 [rows, P, longest], how many count, and the keys as numbers."""

    keys: Ints
    key_sizes: Ints
    values: Ints
    value_sizes: Ints
    codes: Ints

    def take(self, index: Ints) -> _Pairs:
        """Return the pairs at `index`, int64 [rows, Q], of each row."""
        deep = index[:, :, None]
        return _Pairs(
            np.take_along_axis(self.keys, deep, axis=1),
            np.take_along_axis(self.key_sizes, index, axis=1),
            np.take_along_axis(self.values, deep, axis=1),
            np.take_along_axis(self.value_sizes, index, axis=1),
            np.take_along_axis(self.codes, index, axis=1),
        )

    @property
    def sizes(self) -> Ints:
        """Tokens of each pair, int64 [rows, P]."""
        return self.key_sizes + self.value_sizes


def _starts(sizes: Ints) -> Ints:
    return np.cumsum(sizes, axis=1) - sizes


@dataclass(frozen=True)
class FuzzyRecall:
    """Fuzzy in-context recall.

    Raises `UserError` when a setting is impossible: fewer key or value tokens than the longest key or value has, or a
    `length` without room for the probe twice and one pair beside it.
    """

    vocab_size: int = 16
    length: int = 128
    """Tokens of a row, padding included."""
    key_tokens: int = 3
    """Tokens of the longest key."""
    value_tokens: int = 3
    """Tokens of the longest value."""

    name: ClassVar[str] = "mad_fuzzy_recall"
    wording: ClassVar[Wording] = Wording(
        "fuzzy recall",
        "As in-context recall, with keys and values of several tokens.",
    )
    readout: ClassVar[Readout] = "positions"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        for setting in ("vocab_size", "length", "key_tokens", "value_tokens"):
            check_at_least(self.name, setting, getattr(self, setting), 1)
        keys = (self.vocab_size - 1) // 2
        if keys < max(self.key_tokens, 2) or self.vocab_size - 1 - keys < max(self.value_tokens, 2):
            raise UserError(
                f"{self.name}: a vocabulary of {self.vocab_size} has {keys} key and {self.vocab_size - 1 - keys} value "
                f"tokens, too few for keys of {self.key_tokens} and values of {self.value_tokens} distinct tokens; "
                f"use a larger vocab_size"
            )
        longest = self.key_tokens + self.value_tokens
        if self.length <= 2 * longest:
            raise UserError(
                f"{self.name}: pairs of up to {longest} tokens need a length above {2 * longest}, got {self.length}"
            )
        if (keys + 1) ** self.key_tokens >= 2**62:
            raise UserError(f"{self.name}: keys of {self.key_tokens} out of {keys} tokens are too many to tell apart")

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length

    @property
    def chance(self) -> float:
        """One of all value tokens."""
        return 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)

    def ceiling(self, train_examples: int) -> float:
        """Return 1: the row holds every answer."""
        return 1.0

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length] each, labels already shifted."""
        ids = np.empty((rows, self.length), dtype=np.int64)
        labels = np.empty((rows, self.length), dtype=np.int64)
        for start in range(0, rows, CHUNK):
            part = slice(start, min(start + CHUNK, rows))
            sequence, answers = self._draw_rows(generator, part.stop - start, split)
            ids[part] = sequence[:, :-1]
            labels[part] = (sequence if split == "train" else answers)[:, 1:]
        return ids, labels

    def _draw_pairs(self, generator: np.random.Generator, rows: int, split: Split) -> _Pairs:
        """Return more pairs than a row can hold; pairs with equal keys have equal values, those of the first."""
        shortest = (1 if split == "train" else self.key_tokens) + 1
        pairs = -(-self.length // shortest) + 1
        key_count = (self.vocab_size - 1) // 2
        value_count = self.vocab_size - 1 - key_count
        shape = (rows, pairs)
        key_sizes = np.full(shape, self.key_tokens, dtype=np.int64)
        if split == "train":
            key_sizes = 1 + draw_integers(generator, self.key_tokens, shape)
        value_sizes = 1 + draw_integers(generator, self.value_tokens, shape)
        # The first s of several tokens drawn without replacement are s tokens drawn without replacement.
        keys = draw_distinct(generator, key_count, self.key_tokens, rows * pairs).reshape(*shape, -1)
        values = key_count + draw_distinct(generator, value_count, self.value_tokens, rows * pairs).reshape(*shape, -1)
        digits = np.where(np.arange(self.key_tokens) < key_sizes[:, :, None], keys + 1, 0)
        codes = digits @ (key_count + 1) ** np.arange(self.key_tokens, dtype=np.int64)
        first = first_occurrence(codes)
        return _Pairs(
            keys,
            key_sizes,
            np.take_along_axis(values, first[:, :, None], axis=1),
            np.take_along_axis(value_sizes, first, axis=1),
            codes,
        )

    def _place_probe(self, generator: np.random.Generator, pairs: _Pairs) -> tuple[_Pairs, NDArray[np.bool_]]:
        """Return the pairs in the order of the row, the closing probe in the last column, and which are in the row."""
        rows, count = pairs.codes.shape
        probe = pairs.sizes[:, :1]
        limit = self.length - probe - (self.key_tokens + self.value_tokens)
        wanted = np.floor(generator.random((rows, 1)) * (self.length - 2 * probe)).astype(np.int64)
        starts = _starts(pairs.sizes[:, 1:])
        place = np.minimum((starts < wanted).sum(axis=1), (starts < limit).sum(axis=1) - 1)[:, None]
        column = np.arange(count)
        already = (pairs.codes[:, 1:] == pairs.codes[:, :1]) & (column[:-1] < place)
        # A row that shows the probe's key by chance needs no second one: it goes behind everything that fits.
        place = np.where(already.any(axis=1, keepdims=True), count - 1, place)
        order = np.where(column < place, column + 1, np.where(column == place, 0, column))
        inside = _starts(np.take_along_axis(pairs.sizes, order, axis=1)) < limit
        closing = np.zeros((rows, 1), dtype=np.int64)
        return pairs.take(np.hstack([order, closing])), np.hstack([inside, closing == 0])

    def _draw_rows(self, generator: np.random.Generator, rows: int, split: Split) -> tuple[Ints, Ints]:
        """Return (sequence, answers), int64 [rows, length + 1] each; answers are -100 but for values asked for."""
        pairs, inside = self._place_probe(generator, self._draw_pairs(generator, rows, split))
        sizes = np.where(inside, pairs.sizes, 0)
        starts = self.length + 1 - sizes.sum(axis=1, keepdims=True) + _starts(sizes)
        asked = first_occurrence(pairs.codes) != np.arange(pairs.codes.shape[1])

        sequence = np.full((rows, self.length + 1), self.vocab_size - 1, dtype=np.int64)
        answers = np.full((rows, self.length + 1), IGNORE, dtype=np.int64)
        for tokens, tokens_sizes, offset in (
            (pairs.keys, pairs.key_sizes, 0),
            (pairs.values, pairs.value_sizes, pairs.key_sizes),
        ):
            for index in range(tokens.shape[2]):
                row, pair = np.nonzero(inside & (index < tokens_sizes))
                sequence[row, (starts + offset)[row, pair] + index] = tokens[row, pair, index]
        for index in range(self.value_tokens):
            row, pair = np.nonzero(inside & asked & (index < pairs.value_sizes))
            answers[row, (starts + pairs.key_sizes)[row, pair] + index] = pairs.values[row, pair, index]
        return sequence, answers
