r"""Memorization of the MAD suite: facts that no row shows, only the labels of training rows.

A row with `length` 8, vocabulary 256 (keys 0 to 126, values 127 to 254, 255 asks); ``.`` is a label of -100:

    ids    17 255  99 255   3 255  17 255
    labels  . 140   . 201   . 133   . 140

Source: Poli et al. (2024), as in the published settings and code. One fixed map, the same for training and test and
for every seed of the rows, gives each key a value of its own. Keys are drawn with replacement. A model can know the
value of a key only when a training row had it, so few training rows put a ceiling on the accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from longrecall.errors import UserError
from longrecall.tasks.encoding import IGNORE, draw_integers
from longrecall.tasks.sequences import Batch, Ints, Readout, Split, check_at_least
from longrecall.tasks.wording import Wording


@dataclass(frozen=True)
class Memorization:
    """Memorization; raises `UserError` for an odd `length`, one below 2, or fewer than 5 tokens."""

    vocab_size: int = 256
    """The last token asks for the value; the rest are keys and values."""
    length: int = 32
    """Tokens of a row, even."""
    map_seed: int = 12345
    """Of the map from keys to values."""

    name: ClassVar[str] = "mad_memorization"
    wording: ClassVar[Wording] = Wording(
        "memorization",
        "Facts that no row shows must be learned by heart in training.",
    )
    readout: ClassVar[Readout] = "positions"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        check_at_least(self.name, "vocab_size", self.vocab_size, 5)
        check_at_least(self.name, "length", self.length, 2)
        check_at_least(self.name, "map_seed", self.map_seed, 0)
        if self.length % 2:
            raise UserError(f"{self.name}: length must be even, got {self.length}; a row is made of pairs")

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length

    @property
    def keys(self) -> int:
        """How many keys there are: ids 0 to keys - 1; values begin at `keys`."""
        return (self.vocab_size - 1) // 2

    @property
    def chance(self) -> float:
        """One of all values."""
        return 1 / (self.vocab_size - 1 - self.keys)

    def ceiling(self, train_examples: int) -> float:
        """Return the expected share of test queries whose key a training row had: 1 - (1 - 1/K)^(queries in training).

        K is `keys`. Luck with the others may add a little; `leakage_bound` says how much. Raises `UserError` for fewer
        than 1 example.
        """
        check_at_least(self.name, "train_examples", train_examples, 1)
        return -math.expm1(train_examples * (self.length // 2) * math.log1p(-1 / self.keys))

    def value_map(self) -> Ints:
        """Return int64 [keys]: the value of each key, all different."""
        generator = np.random.Generator(np.random.PCG64(self.map_seed))
        count = self.vocab_size - 1 - self.keys
        return np.argsort(generator.random(count), kind="stable")[: self.keys].astype(np.int64) + self.keys

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length] each: a label at every odd index."""
        keys = draw_integers(generator, self.keys, (rows, self.length // 2))
        ids = np.full((rows, self.length), self.vocab_size - 1, dtype=np.int64)
        labels = np.full((rows, self.length), IGNORE, dtype=np.int64)
        ids[:, ::2], labels[:, 1::2] = keys, self.value_map()[keys]
        return ids, labels


def seen_share(train_ids: Ints, test_ids: Ints) -> float:
    """Return the share of test queries whose key is in a training row: what `ceiling` expects, for these very rows.

    Both int64 [rows, length] of one `Memorization` task.
    """
    return float(np.isin(test_ids[:, ::2], train_ids[:, ::2]).mean())


def leakage_bound(task: Memorization, train_ids: Ints, test_ids: Ints) -> float:
    """Return the highest token accuracy on `test_ids` that memory of `train_ids` and luck explain.

    A score above it means that test answers reached the training. Seen keys count as right. An unseen key is guessed
    among the values that no seen key has, all its queries right or wrong together; the bound adds the mean of that,
    five standard deviations, and one key for the discreteness of small counts. Both arrays int64 [rows, length].
    """
    asked = test_ids[:, ::2]
    seen = np.unique(train_ids[:, ::2])
    _, queries = np.unique(asked[~np.isin(asked, seen)], return_counts=True)
    if not len(queries):
        return 1.0
    luck = 1 / (task.vocab_size - 1 - task.keys - len(seen))
    spread = math.sqrt(luck * (1 - luck) * float((queries**2).sum()))
    right = asked.size - queries.sum() + luck * queries.sum() + 5 * spread + queries.max()
    return min(1.0, float(right) / asked.size)
