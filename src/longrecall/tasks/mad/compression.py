r"""Compression of the MAD suite: one state must hold the whole row.

A row with `length` 8, vocabulary 16 (15 ends the row):

    ids     3 11  0  7  7 14  2 15
    labels  3 11  0  7  7 14  2 15

Source: Poli et al. (2024), as in the published settings and code. All tokens but the last are uniform. A causal
encoder reads the row; its output at the last position plus a sinusoidal code of position t goes through an MLP of two
GELU layers, whose output names the token at t. The labels are therefore the row itself, not
shifted by one. Training rows and test rows follow one law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from longrecall.tasks.encoding import draw_integers
from longrecall.tasks.sequences import Batch, Readout, Split, check_at_least
from longrecall.tasks.wording import Wording


@dataclass(frozen=True)
class Compression:
    """Compression; raises `UserError` for fewer than 3 tokens in the vocabulary or 2 in a row."""

    vocab_size: int = 16
    """The last token ends the row."""
    length: int = 32
    """Tokens of a row."""

    name: ClassVar[str] = "mad_compression"
    wording: ClassVar[Wording] = Wording(
        "compression",
        "A row of random tokens must be rebuilt from what the model holds at its last token.",
    )
    readout: ClassVar[Readout] = "last_state"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        check_at_least(self.name, "vocab_size", self.vocab_size, 3)
        check_at_least(self.name, "length", self.length, 2)

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length

    @property
    def chance(self) -> float:
        """The closing token is known, the others are one of all that can stand there."""
        return (1 + (self.length - 1) / (self.vocab_size - 1)) / self.length

    def ceiling(self, train_examples: int) -> float:
        """Return 1: the row holds every answer."""
        return 1.0

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length] each; ``labels[:, t]`` is ``ids[:, t]``, see the module."""
        ids = np.full((rows, self.length), self.vocab_size - 1, dtype=np.int64)
        ids[:, :-1] = draw_integers(generator, self.vocab_size - 1, (rows, self.length - 1))
        return ids, ids.copy()
