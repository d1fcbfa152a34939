r"""In-context recall and noisy in-context recall of the MAD suite: the value a key had before, again and again.

A test row with `length` 10, vocabulary 16 (keys 0 to 7, values 8 to 15); ``.`` is a label of -100:

    ids     3  9  5 12  3  9  6  8  5
    labels  .  .  .  .  9  .  .  . 12

Source: Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures" (2024), with many queries per
row as in the published settings. ``length / 2`` pairs; every pair but the last has a key drawn with replacement, a new
key draws a value (two keys may have the same one), and the last pair repeats a key of the row. Its value is not read,
so a row has ``length - 1`` tokens. In training every next token is a label, in a test the values of keys that came
before. In the noisy task a pair becomes two random noise tokens with probability `noise_share`; one pair, drawn among
all but the last, never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import IGNORE, draw_integers
from longrecall.tasks.mad.pairs import CHUNK, first_occurrence
from longrecall.tasks.sequences import Batch, Ints, Readout, Split, check_at_least, check_between
from longrecall.tasks.wording import Wording


def _check_pairs(name: str, length: int, tokens: int) -> None:
    check_at_least(name, "length", length, 4)
    if length % 2:
        raise UserError(f"{name}: length must be even, got {length}; a row is made of pairs")
    if tokens < 4:
        raise UserError(f"{name}: {tokens} tokens are left for keys and values, fewer than 4; use a larger vocab_size")


def _draw_pairs(generator: np.random.Generator, pairs: int, tokens: int, noisy: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return (keys, values), int64 [rows, pairs] each: all pairs, the last one a key of the others not `noisy`.

    `noisy`, bool [rows, pairs - 1], with at least one False a row; what stands at noisy pairs means nothing.
    """
    rows, key_count = len(noisy), tokens // 2
    keys = draw_integers(generator, key_count, (rows, pairs))
    # Only the values of keys that appear are ever used, and those are independent uniform draws.
    table = key_count + draw_integers(generator, tokens - key_count, (rows, key_count))
    shown = np.zeros((rows, key_count), dtype=bool)
    row, pair = np.nonzero(~noisy)
    shown[row, keys[row, pair]] = True
    keys[:, -1] = np.argmax(np.where(shown, generator.random((rows, key_count)), -1.0), axis=1)
    return keys, np.take_along_axis(table, keys, axis=1)


def _draw_rows(
    generator: np.random.Generator, rows: int, length: int, tokens: int, noise: tuple[int, float]
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return (sequence int64 [rows, length], asked bool [rows, length / 2]: whose key came before)."""
    noise_tokens, noise_share = noise
    pairs = length // 2
    noisy = np.zeros((rows, pairs - 1), dtype=bool)
    if noise_share > 0:
        noisy = generator.random((rows, pairs - 1)) < noise_share
        np.put_along_axis(noisy, draw_integers(generator, pairs - 1, (rows, 1)), False, axis=1)
    keys, values = _draw_pairs(generator, pairs, tokens, noisy)
    codes = keys.copy()
    codes[:, :-1][noisy] = -1
    asked = first_occurrence(codes) != np.arange(pairs)
    asked[:, :-1] &= ~noisy
    sequence = np.stack([keys, values], axis=2)
    if noise_share > 0:
        sequence[:, :-1][noisy] = tokens + draw_integers(generator, noise_tokens, (int(noisy.sum()), 2))
    return sequence.reshape(rows, length), asked


def _draw_batch(
    generator: np.random.Generator, rows: int, length: int, tokens: int, noise: tuple[int, float], split: Split
) -> Batch:
    """Return (ids, labels), int64 [rows, length - 1] each; `noise` is (noise tokens, share of noisy pairs)."""
    ids = np.empty((rows, length - 1), dtype=np.int64)
    labels = np.full((rows, length - 1), IGNORE, dtype=np.int64)
    for start in range(0, rows, CHUNK):
        part = slice(start, min(start + CHUNK, rows))
        sequence, asked = _draw_rows(generator, part.stop - start, length, tokens, noise)
        ids[part] = sequence[:, :-1]
        if split == "train":
            labels[part] = sequence[:, 1:]
        else:
            labels[part, ::2] = np.where(asked, sequence[:, 1::2], IGNORE)
    return ids, labels


@dataclass(frozen=True)
class InContextRecall:
    """In-context recall without noise.

    Raises `UserError` when a setting is impossible: an odd `length` or one below 4, fewer than 4 tokens.
    """

    vocab_size: int = 16
    length: int = 128
    """Tokens of all pairs, even; a row has one less."""

    name: ClassVar[str] = "mad_in_context_recall"
    wording: ClassVar[Wording] = Wording(
        "in-context recall",
        "Pairs of a key and a value follow each other; when a key comes again, its value must be named.",
    )
    readout: ClassVar[Readout] = "positions"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        check_at_least(self.name, "vocab_size", self.vocab_size, 1)
        _check_pairs(self.name, self.length, self.vocab_size)

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length - 1

    @property
    def chance(self) -> float:
        """One of all values."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def ceiling(self, train_examples: int) -> float:
        """Return 1: the row holds every answer."""
        return 1.0

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length - 1] each, labels already shifted."""
        return _draw_batch(generator, rows, self.length, self.vocab_size, (0, 0.0), split)


@dataclass(frozen=True)
class NoisyRecall:
    """In-context recall between pairs of noise.

    Raises `UserError` when a setting is impossible: as `InContextRecall`, with `noise_tokens` taken off the
    vocabulary; a `noise_share` outside [0, 1); noise without noise tokens.
    """

    vocab_size: int = 32
    """All tokens; the last `noise_tokens` are noise."""
    length: int = 128
    """Tokens of all pairs, even; a row has one less."""
    noise_tokens: int = 16
    noise_share: float = 0.2
    """Probability of a pair to be noise."""

    name: ClassVar[str] = "mad_noisy_recall"
    wording: ClassVar[Wording] = Wording(
        "noisy recall",
        "As in-context recall, with random tokens between the pairs.",
    )
    readout: ClassVar[Readout] = "positions"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        check_at_least(self.name, "vocab_size", self.vocab_size, 1)
        check_at_least(self.name, "noise_tokens", self.noise_tokens, 0)
        _check_pairs(self.name, self.length, self.vocab_size - self.noise_tokens)
        check_between(self.name, "noise_share", self.noise_share, 0, 1)
        if self.noise_share > 0 and not self.noise_tokens:
            raise UserError(f"{self.name}: noise_share {self.noise_share} needs noise_tokens of at least 1, got 0")

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length - 1

    @property
    def chance(self) -> float:
        """One of all values."""
        tokens = self.vocab_size - self.noise_tokens
        return 1 / (tokens - tokens // 2)

    def ceiling(self, train_examples: int) -> float:
        """Return 1: the row holds every answer."""
        return 1.0

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length - 1] each, labels already shifted."""
        noise = (self.noise_tokens, self.noise_share)
        return _draw_batch(generator, rows, self.length, self.vocab_size - self.noise_tokens, noise, split)
