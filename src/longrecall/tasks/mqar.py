r"""Multi-query associative recall (MQAR): pairs are shown once, then every key is asked for at some distance.

A row of 16 tokens with two pairs, vocabulary 12, no filler (``.`` is a label of -100):

    ids     2  8  4  7  0  0  4  0  0  0  0  0  2  0  0  0
    labels  .  .  .  .  .  .  7  .  .  .  .  .  8  .  .  .

Source: Arora et al., "Zoology" (2023), as its published generator draws it. Keys come from [1, V/2), values from
[V/2, V), both without replacement. The k pairs fill the first C = 2k positions, and S = (L - C)/2 slots of two tokens
follow. Slot r = 1..S has the probability p(r) ~ r^(a-1); the keys, in their order, take k slots one after the other
without replacement, so an earlier key tends to stand nearer. The key in slot r stands at C + 2(r - 1), and its value is
the label there. With filler, every token that is still 0 becomes a uniform one of the whole vocabulary, keys and values
included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import IGNORE, draw_integers
from longrecall.tasks.sequences import Batch, Ints, Readout, Split, check_at_least, check_between, draw_distinct
from longrecall.tasks.wording import Wording

_CHUNK = 4096
"""Rows drawn at a time: bounds the memory of a large data set."""


def slot_probabilities(slots: int, power: float) -> NDArray[np.float64]:
    """Return float64 [slots]: the probability of each slot to be taken first, r^(power - 1) scaled to sum 1."""
    weights = np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def draw_slots(generator: np.random.Generator, probabilities: NDArray[np.float64], count: int, rows: int) -> Ints:
    """Return int64 [rows, count]: slots taken one after the other without replacement, in the order they were taken.

    Slot r waits for an exponential time with rate p(r). The first to arrive is r with probability p(r), and among those
    that are left the same holds again, because the exponential law has no memory: the `count` earliest, in order, are
    a sequential draw (Efraimidis and Spirakis 2006; the Gumbel top-k in other words).
    """
    times = -np.log1p(-generator.random((rows, len(probabilities)))) / probabilities
    if count < len(probabilities):
        nearest = np.argpartition(times, count - 1, axis=1)[:, :count]
    else:
        nearest = np.broadcast_to(np.arange(count), (rows, count))
    order = np.argsort(np.take_along_axis(times, nearest, axis=1), axis=1, kind="stable")
    return np.take_along_axis(nearest, order, axis=1).astype(np.int64)


@dataclass(frozen=True)
class Mqar:
    """Multi-query associative recall; training and test rows follow the same law.

    Raises `UserError` when a setting is impossible: `length` odd or below 4 * `pairs`, a vocabulary with fewer keys or
    values than `pairs`, a `power` outside [0, 10).
    """

    length: int = 64
    """Tokens of a row, even."""
    pairs: int = 4
    """Key-value pairs k; each is asked for once."""
    vocab_size: int = 8192
    power: float = 0.01
    """a of the slots' power law; 1 makes every slot equally likely."""
    filler: bool = False
    """Random tokens between the queries, instead of zeros."""

    name: ClassVar[str] = "mqar"
    wording: ClassVar[Wording] = Wording(
        "multi-query associative recall",
        "A row of tokens shows pairs of a key and a value; later every key is asked for, at some distance "
        "from its pair.",
    )
    readout: ClassVar[Readout] = "positions"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        check_at_least(self.name, "pairs", self.pairs, 1)
        check_at_least(self.name, "length", self.length, 4)
        check_at_least(self.name, "vocab_size", self.vocab_size, 4)
        if self.length % 2:
            raise UserError(f"mqar: length must be even, got {self.length}; keys and slots take two tokens each")
        if 4 * self.pairs > self.length:
            raise UserError(
                f"mqar: {self.pairs} pairs and their queries need a length of at least {4 * self.pairs}, "
                f"got {self.length}; use a longer length or fewer pairs"
            )
        keys = self.vocab_size // 2 - 1
        if self.pairs > keys:
            raise UserError(
                f"mqar: a vocabulary of {self.vocab_size} has {keys} keys, fewer than {self.pairs} pairs need; "
                f"use vocab_size {2 * self.pairs + 2} or more"
            )
        check_between(self.name, "power", self.power, 0, 10)
        if not isinstance(self.filler, bool):
            raise UserError(f"mqar: filler must be true or false, got {self.filler!r}")

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length

    @property
    def chance(self) -> float:
        """One of all values of the vocabulary. One of the values in the row would be right in 1 of `pairs` queries."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def ceiling(self, train_examples: int) -> float:
        """Return 1: the row holds every answer."""
        return 1.0

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length] each, labels already shifted: exactly `pairs` labels a row."""
        ids = np.zeros((rows, self.length), dtype=np.int64)
        labels = np.full((rows, self.length), IGNORE, dtype=np.int64)
        for start in range(0, rows, _CHUNK):
            self._fill(generator, ids[start : start + _CHUNK], labels[start : start + _CHUNK])
        return ids, labels

    def _fill(self, generator: np.random.Generator, ids: Ints, labels: Ints) -> None:
        """Write rows into `ids` (zeros on entry) and `labels` (-100 on entry)."""
        rows, first_value, context = len(ids), self.vocab_size // 2, 2 * self.pairs
        keys = draw_distinct(generator, first_value - 1, self.pairs, rows) + 1
        values = draw_distinct(generator, self.vocab_size - first_value, self.pairs, rows) + first_value
        ids[:, 0:context:2], ids[:, 1:context:2] = keys, values

        probabilities = slot_probabilities((self.length - context) // 2, self.power)
        asked = context + 2 * draw_slots(generator, probabilities, self.pairs, rows)
        np.put_along_axis(ids, asked, keys, axis=1)
        np.put_along_axis(labels, asked, values, axis=1)
        if self.filler:
            empty = ids == 0
            ids[empty] = draw_integers(generator, self.vocab_size, (int(empty.sum()),))
