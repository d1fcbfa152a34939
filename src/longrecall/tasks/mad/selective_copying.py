r"""Selective copying of the MAD suite: say the tokens that stood between blanks, in their order.

A row with `length` 12, three tokens to copy, vocabulary 16 (blank 14, copy token 15); ``.`` is a label of -100:

    ids    14  4 14 14 11 14 14  7 15 14 14 14
    labels  .  .  .  .  .  .  .  .  .  4 11  7

Source: Poli et al. (2024), as in the published settings and code. ``length - 2 * copied - 1`` blanks are inserted,
each before one of the tokens chosen uniformly, so none stands between the last token and the copy token. The answers
are read at the blanks behind the copy token. Training rows and test rows have the same labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from longrecall.errors import UserError
from longrecall.tasks.encoding import IGNORE, draw_integers
from longrecall.tasks.sequences import Batch, Readout, Split, check_at_least
from longrecall.tasks.wording import Wording


@dataclass(frozen=True)
class SelectiveCopying:
    """Selective copying.

    Raises `UserError` when a setting is impossible: fewer than 4 tokens, or a `length` of 2 * `copied` + 1 or less.
    """

    vocab_size: int = 16
    """The last two tokens are the blank and the copy token."""
    length: int = 256
    """Tokens of a row."""
    copied: int = 16
    """Tokens to copy."""

    name: ClassVar[str] = "mad_selective_copying"
    wording: ClassVar[Wording] = Wording(
        "selective copying",
        "Tokens that stand between blanks must be repeated in their order.",
    )
    readout: ClassVar[Readout] = "positions"

    def __post_init__(self) -> None:
        """Check the settings before anything runs."""
        check_at_least(self.name, "vocab_size", self.vocab_size, 4)
        check_at_least(self.name, "copied", self.copied, 1)
        check_at_least(self.name, "length", self.length, 1)
        if self.length <= 2 * self.copied + 1:
            raise UserError(
                f"{self.name}: {self.copied} tokens, their copies, the copy token and a blank need a length of at "
                f"least {2 * self.copied + 2}, got {self.length}"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.length

    @property
    def chance(self) -> float:
        """One of all tokens that are copied."""
        return 1 / (self.vocab_size - 2)

    def ceiling(self, train_examples: int) -> float:
        """Return 1: the row holds every answer."""
        return 1.0

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return (ids, labels), int64 [rows, length] each: `copied` labels at the end of each row."""
        tokens = draw_integers(generator, self.vocab_size - 2, (rows, self.copied))
        blanks = draw_integers(generator, self.copied, (rows, self.length - 2 * self.copied - 1))
        flat = (np.arange(rows)[:, None] * self.copied + blanks).reshape(-1)
        before = np.bincount(flat, minlength=rows * self.copied).reshape(rows, self.copied)
        ids = np.full((rows, self.length), self.vocab_size - 2, dtype=np.int64)
        np.put_along_axis(ids, np.arange(self.copied) + np.cumsum(before, axis=1), tokens, axis=1)
        ids[:, -self.copied - 1] = self.vocab_size - 1
        labels = np.full((rows, self.length), IGNORE, dtype=np.int64)
        labels[:, -self.copied :] = tokens
        return ids, labels
