"""Sequence tasks: rows of token ids for models trained from scratch, without text and without a tokenizer.

A batch is ``(ids, labels)``, both int64 [rows, T]. Unlike the labels of a text sample, `labels` are ALREADY SHIFTED:
``labels[:, t]`` is what the model's output at position t should be, -100 where nothing is asked. With
``readout = "positions"`` that output is the one a language model has after reading ``ids[:, : t + 1]``. With
``"last_state"`` a causal encoder reads the whole row, and a decoder makes the output of every position out of the
encoder's last state and the position.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import draw_integers, sample_generator
from longrecall.tasks.wording import Wording

Ints = NDArray[np.int64]
Batch = tuple[Ints, Ints]
Split = Literal["train", "test"]
Readout = Literal["positions", "last_state"]

SPLITS: tuple[Split, ...] = ("train", "test")


class SequenceTask(Protocol):
    """A task whose settings are the fields of a frozen dataclass, `vocab_size` among them."""

    name: ClassVar[str]
    """The registered name."""
    wording: ClassVar[Wording]
    """What reports call it, and what it asks, in words."""
    readout: ClassVar[Readout]
    """Where the answers are read from; see the module's first lines."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are; `ids` and labels lie in [0, vocab_size)."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens T of a row of the batch."""
        ...

    @property
    def chance(self) -> float:
        """Expected token accuracy on test labels of a guess that knows which tokens can be answers, and no more."""
        ...

    def ceiling(self, train_examples: int) -> float:
        """Return the expected token accuracy on test labels of a perfect learner of that many training rows."""
        ...

    def batch(self, generator: np.random.Generator, rows: int, split: Split) -> Batch:
        """Return `rows` independent rows of `split`, int64 [rows, sequence_length] each, labels already shifted."""
        ...


def split_generator(task: SequenceTask, split: Split, seed: int, index: int = 0) -> np.random.Generator:
    """Return the generator of batch `index` of a split: same arguments, same rows, on every platform.

    Different splits, indices, seeds, tasks and settings have independent streams, so training and test rows can only
    be equal by chance. Raises `UserError` for an unknown split or a negative seed or index.
    """
    if split not in SPLITS:
        raise UserError(f'{task.name}: unknown split "{split}"; use "train" or "test"')
    if seed < 0 or index < 0:
        raise UserError(f"{task.name}: seed and index must be 0 or more, got seed {seed} and index {index}")
    settings: dict[str, Any] = dataclasses.asdict(task)  # type: ignore[call-overload]  # every task is a dataclass
    return sample_generator(seed, f"{task.name}/{split}", settings, index)


def sequence_batch(task: SequenceTask, split: Split, seed: int, rows: int, index: int = 0) -> Batch:
    """Return (ids, labels), int64 [rows, task.sequence_length]: batch `index` of a split; labels already shifted.

    A whole data set is one call with as many rows. The rows of a call are drawn together: ten rows are not the first
    ten of a hundred. Raises `UserError` for fewer than 1 row and as `split_generator` does.
    """
    return task.batch(split_generator(task, split, seed, index), check_at_least(task.name, "rows", rows, 1), split)


def check_at_least(name: str, setting: str, value: int, least: int) -> int:
    """Return `value`; raises `UserError` when it is no whole number or below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}: {setting} must be a whole number of at least {least}, got {value!r}")
    return value


def check_between(name: str, setting: str, value: float, low: float, high: float) -> float:
    """Return `value`; raises `UserError` when it is no number in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
        raise UserError(f"{name}: {setting} must be a number of at least {low} and below {high}, got {value!r}")
    return value


def draw_distinct(generator: np.random.Generator, high: int, count: int, rows: int) -> Ints:
    """Return int64 [rows, count]: each row drawn from [0, high) without replacement, in random order.

    Every ordered choice is equally likely. Needs count <= high.
    """
    if 4 * count > high:
        order: Ints = np.argsort(generator.random((rows, high)), axis=1)[:, :count].astype(np.int64)
        return order
    drawn = draw_integers(generator, high, (rows, count))
    pending = np.arange(rows)
    while len(pending):
        # Which of two equal entries is drawn again does not matter: no step tells one value from another, so all
        # ordered choices of distinct values stay equally likely.
        part = drawn[pending]
        order = np.argsort(part, axis=1, kind="stable")
        ranked = np.take_along_axis(part, order, axis=1)
        again = np.zeros(part.shape, dtype=bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        part[again] = draw_integers(generator, high, (int(again.sum()),))
        drawn[pending] = part
        pending = pending[again.any(axis=1)]
    return drawn
