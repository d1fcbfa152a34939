"""What a task declares for everybody else: its flags, its training source, its numbers and its part of a report.

All of it is plain data and functions, in the task's own file. The command line, recipes, result files and reports read
it through `longrecall.tasks.registry`, so a new task changes none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.tasks.charts import TaskSection
from longrecall.tasks.encoding import PieceEncoder

Ints = NDArray[np.int64]
Make = Callable[[np.random.Generator, int], tuple[Ints, Ints]]
"""(generator, length) -> (input_ids, labels), int64 ``[length]`` each: one training sequence."""


@dataclass(frozen=True)
class Flag:
    """An argument of ``longrecall eval`` of its own for one option of a task.

    `name`: ``--pairs``; `option`: the field of the task's class, whose default holds when the flag is not given;
    `letter`: how the help text calls the value; `read`: text -> value, for an option of several values of each of them.
    """

    name: str
    option: str
    letter: str
    help: str
    read: Callable[[str], Any] = int


class TrainingSource(ABC):
    """A source of a training recipe whose sequences the task makes: a frozen dataclass with the fields of the recipe.

    `kind` is what the recipe calls it: the name of the task. `weight` is a field of every source.
    """

    kind: ClassVar[str] = ""
    weight: float

    @abstractmethod
    def sequences(self, pieces: PieceEncoder) -> Make:
        """Return the function that makes a sequence; it raises `UserError` for a length that cannot hold one."""


@dataclass(frozen=True)
class Capacity:
    """How much a model holds, as a number of the result file's summary, ``TASK.capacity``.

    It is the greatest value of `counted` (a key of the cells) such that it and all smaller ones are answered rightly
    nine times in ten. `apart` may be another key: the number is told for its least value, and apart for each other one.
    `words`: how a report calls the number where it compares it with the size of the state; "" = it does not.
    """

    counted: str
    apart: str = ""
    words: str = ""


@dataclass(frozen=True)
class Headline:
    """A number at the top of a report: the mean of `metric` over the cells that say `part`, over all cells without.

    `summary`: the number of that name in the result file's summary instead.
    """

    name: str
    metric: str = "accuracy"
    part: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    more_is_better: bool = True
    digits: int = 3


@dataclass(frozen=True)
class ReportPart:
    """What a report says of a task beside its tables.

    `metrics` have a section of their own, so their tables are folded away. `numbers` and `texts` are keys that each of
    its cells has, as a number or as a text. `headlines`: cells -> the numbers at the top. `section`: its section; None
    for none. `shares`: the metrics are shares of right answers; other tasks stand after those that are.
    """

    metrics: tuple[str, ...]
    numbers: tuple[str, ...]
    texts: tuple[str, ...] = ()
    headlines: Callable[[Sequence[Mapping[str, Any]]], Sequence[Headline]] | None = None
    section: TaskSection | None = None
    shares: bool = True


@dataclass(frozen=True)
class HarnessForm:
    """How lm-evaluation-harness asks a task: the model says `answer_tokens` at most, and none after a text of `until`.

    `metrics`: what `longrecall.evaluation.harness.generators.score_document` tells of an answer.
    """

    answer_tokens: int
    until: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)


@dataclass(frozen=True)
class Declaration:
    """Everything that a task tells the other parts of longrecall; what it leaves out stays at its default.

    `length_unit`: what ``--lengths`` counts. `text_option`: the option that takes the text of ``--text``.
    `averaged`: whether result files sum it up as the mean over its cells. `pooled`: the metric that they sum up over
    the bytes of all cells instead, under the task's name. `reads_longest`: whether all cells are read together at the
    longest of the lengths, so that another longest length asks other questions. `harness`: None = it is no task of
    lm-evaluation-harness.
    """

    flags: tuple[Flag, ...] = ()
    length_unit: str = "tokens"
    text_option: str = ""
    source: type[TrainingSource] | None = None
    capacity: Capacity | None = None
    averaged: bool = True
    pooled: str = ""
    reads_longest: bool = False
    harness: HarnessForm | None = None
    report: ReportPart | None = None
