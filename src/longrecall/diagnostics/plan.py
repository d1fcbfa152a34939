"""What a diagnosis does, checked before anything is loaded or read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.diagnostics.effective_remembrance import check_starts
from longrecall.diagnostics.recall_length import DOUBLINGS
from longrecall.errors import UserError, did_you_mean

PARTS = ("perplexity", "state", "remembrance", "recall")

REMEMBRANCE_MULTIPLE = 4
"""Effective remembrance is taken at 4 times the training length, as in its source."""

MOST_DOUBLINGS = 16
"""65536 times the first keys tell 0.5 from 0.499; more is a slip of the finger."""


@dataclass(frozen=True)
class Plan:
    """What a diagnosis does; lengths in tokens. `diagnose` explains the fields."""

    training_length: int
    multiple: int = 16
    sequences: int = 8
    seed: int = 0
    parts: tuple[str, ...] = PARTS
    starts: tuple[int, ...] | None = None
    recall_samples: int = 40
    recall_doublings: int = DOUBLINGS
    batch_tokens: int = 2048
    segment_tokens: int = 256

    def __post_init__(self) -> None:
        """Check everything that needs no model."""
        if self.training_length < 2:
            raise UserError(f"the training length must be at least 2 tokens, got {self.training_length}")
        if self.multiple < 2:
            raise UserError(f"multiple must be at least 2, to look past the training length, got {self.multiple}")
        for name in ("sequences", "recall_samples", "batch_tokens", "segment_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.recall_doublings <= MOST_DOUBLINGS:
            raise UserError(f"recall-doublings must be from 0 to {MOST_DOUBLINGS}, got {self.recall_doublings}")
        check_parts(self.parts)
        if self.starts is not None:
            check_starts(self.starts, self.remembrance_length)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.training_length * self.multiple

    @property
    def remembrance_length(self) -> int:
        """Tokens T of the sequences on which effective remembrance is taken."""
        return min(self.length, REMEMBRANCE_MULTIPLE * self.training_length)

    @property
    def text_length(self) -> int:
        """Tokens of a window of the text; 0 where no part reads text."""
        if {"perplexity", "state"} & set(self.parts):
            return self.length
        return self.remembrance_length if "remembrance" in self.parts else 0


def check_parts(parts: Sequence[str]) -> None:
    """Raise `UserError` for an unknown part (with the nearest name), a repeated one, or none at all."""
    for part in parts:
        if part not in PARTS:
            raise UserError(f'unknown part "{part}"; there are {", ".join(PARTS)}.{did_you_mean(part, PARTS)}')
        if list(parts).count(part) > 1:
            raise UserError(f"part {part} is listed {list(parts).count(part)} times; list it once")
    if not parts:
        raise UserError(f"give at least one part: {', '.join(PARTS)}")


def make_plan(training_length: int | None, *, parts: tuple[str, ...] | None, recurrent: bool, **settings: Any) -> Plan:
    """Return the checked plan; `parts` None means all, without "state" where the model is not `recurrent`."""
    if training_length is None:
        raise UserError("the checkpoint does not say how long its training sequences were; give --training-length")
    if parts is None:
        parts = tuple(part for part in PARTS if recurrent or part != "state")
    elif "state" in parts and not recurrent:
        raise UserError("the model has no recurrent layers, so there is no state to look at; leave out the part state")
    return Plan(training_length, parts=parts, **settings)
