"""Needles as training sequences: a key and its value somewhere in a long text, asked for at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from longrecall.errors import UserError
from longrecall.tasks.declaration import Make, TrainingSource
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.needles.pieces import Ints, widest
from longrecall.tasks.needles.task import TASKS, Needles
from longrecall.tasks.needles.wording import KINDS
from longrecall.tasks.text import read_text, shipped_text
from longrecall.value_rules import check_weight, one_of

NAMES = tuple(task.name for task in TASKS)
_SEED = -1
"""Of the samples: no evaluation has it, so that none of its questions are trained on but by chance."""


@dataclass(frozen=True)
class NeedleSource(TrainingSource):
    """RULER's needles hidden in a long text; only the values that are asked for are labelled."""

    kind: ClassVar[str] = "needles"

    tasks: tuple[str, ...] = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")
    """Some of the eight niah tasks, equally likely."""
    path: str | None = None
    """A UTF-8 text file, the haystack of those that read one; none = the book that ships for training."""
    loss_on: str = "answers"
    """answers, or all: every token."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        """Check the fields before anything runs."""
        check_weight(self.weight)
        one_of("loss_on", self.loss_on, ("answers", "all"))
        if not self.tasks:
            raise UserError("tasks is empty; name at least one")
        for task in self.tasks:
            one_of("tasks", task, NAMES)

    def sequences(self, pieces: PieceEncoder) -> Make:
        """Return the function that makes a training sequence; the text of `path` is read here."""
        text = shipped_text("train") if self.path is None else read_text(self.path)
        tasks = [_task(name, pieces, text) for name in dict.fromkeys(self.tasks)]
        tried: set[int] = set()

        def make(generator: np.random.Generator, length: int) -> tuple[Ints, Ints]:
            if length not in tried:
                # All of them, so that one that does not fit shows before the run starts.
                for task in tasks:
                    needle_sequence(np.random.Generator(np.random.PCG64(0)), pieces, task, length)
                tried.add(length)
            chosen = tasks[int(generator.random() * len(tasks))]
            ids, labels = needle_sequence(generator, pieces, chosen, length)
            return ids, ids if self.loss_on == "all" else labels

        return make


def needle_sequence(
    generator: np.random.Generator, encode: PieceEncoder, task: Needles, length: int
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), int64 [length] each: one training sequence, its answer included and labelled.

    What whole sentences leave free at the end is filled with the beginning of the prompt, without labels. Raises
    `UserError` when the length cannot hold needles and question.
    """
    # One number of 53 bits stands for everything that the sample draws.
    sample = task.sample(encode, {"length": length}, int(generator.random() * 2**53), _SEED)
    ids, labels = sample.input_ids[:length], sample.labels[:length]
    missing = length - len(ids)
    return np.concatenate((ids, np.resize(ids, missing))), np.concatenate((labels, np.full(missing, -100)))


def _task(name: str, encode: PieceEncoder, text: str) -> Needles:
    """Return the task with room for its answer and no more."""
    kind = KINDS[name]
    size = widest(encode, kind, name)
    options: Mapping[str, Any] = {"haystack": text} if kind.haystack == "essay" else {}
    task = next(task for task in TASKS if task.name == name)
    # Values are joined by commas, which may be tokens of their own.
    return task(answer_tokens=kind.answers * (size.value + 1), **options)
