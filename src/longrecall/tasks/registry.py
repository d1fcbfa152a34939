"""Names of tasks -> their classes. A new task joins with one `register` line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.babilong import Babilong
from longrecall.tasks.bits_per_byte import BitsPerByte
from longrecall.tasks.copying import Copying
from longrecall.tasks.declaration import Declaration, Ints, ReportPart, TrainingSource
from longrecall.tasks.encoding import Cell, ChoiceSample, PieceEncoder, QuestionSample, Sample
from longrecall.tasks.in_context import InContext, MetaICL
from longrecall.tasks.needles import TASKS as NEEDLES
from longrecall.tasks.needles import NeedleSource
from longrecall.tasks.passkey import Passkey, SpokenPasskey
from longrecall.tasks.phonebook import Phonebook
from longrecall.tasks.question_answering import QuestionAnswering
from longrecall.tasks.sequence_registry import sequence_wording
from longrecall.tasks.wording import Wording


class RecallTask(Protocol):
    """A task whose samples hold answers that are right or wrong.

    One that also counts single tokens of its answers says so with a class variable `token_metric`, the metric's name.
    A class variable `wording` (`longrecall.tasks.wording.Wording`) says what reports call it and what it asks.
    """

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    def cells(self, lengths: Sequence[int]) -> Sequence[Cell]:
        """Return the cells to run for these lengths (tokens)."""
        ...

    def answers_per_sample(self, cell: Cell) -> int:
        """Return how many answers a sample of `cell` holds at least."""
        ...

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Sample:
        """Return sample `index`, the same for the same arguments."""
        ...


@runtime_checkable
class QuestionTask(RecallTask, Protocol):
    """A recall task with one question per sample, which the model answers in its own words."""

    @property
    def answer_tokens(self) -> int:
        """How many tokens the model may say."""
        ...

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> QuestionSample:
        """Return sample `index`, the same for the same arguments; its last tokens, the answer, are labelled."""
        ...

    def ended(self, said: str) -> bool:
        """Return whether nothing said after this can count."""
        ...

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        """Return whether `said`, the text after the prompt, is right."""
        ...


@runtime_checkable
class TextMetricTask(QuestionTask, Protocol):
    """A question task whose answers are also compared with the accepted ones word by word."""

    @property
    def text_metrics(self) -> tuple[str, ...]:
        """Names of `longrecall.evaluation.text_metrics`, each a result entry of its own."""
        ...

    def answer_of(self, said: str) -> str:
        """Return the part of what the model said that is compared."""
        ...


@runtime_checkable
class GradedTask(QuestionTask, Protocol):
    """A question task whose answers can be partly right; its samples (`GradedSample`) say how full they are."""

    def settled(self, sample: QuestionSample, said: str) -> bool:
        """Return whether nothing said after this can change the judgement or a grade of `sample`."""
        ...

    @property
    def highest_grades(self) -> Mapping[str, float]:
        """Metric -> the best grade; 0 is the worst of all."""
        ...

    def grades(self, cell: Cell, sample: QuestionSample, said: str) -> Mapping[str, float]:
        """Return metric -> grade of what the model said, each a result entry of its own (a mean over samples)."""
        ...


@runtime_checkable
class ChoiceTask(Protocol):
    """A task whose samples offer options; the one with the lowest mean cross-entropy per token is the choice."""

    # Tells this protocol from the others at run time: isinstance() compares the names of members only.
    choices: ClassVar[bool]

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    def cells(self, lengths: Sequence[int]) -> Sequence[Cell]:
        """Return the cells to run; a task without lengths ignores them."""
        ...

    def answers_per_sample(self, cell: Cell) -> int:
        """Return 1: one choice per sample."""
        ...

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> ChoiceSample:
        """Return sample `index`, the same for the same arguments."""
        ...


@runtime_checkable
class PositionTask(Protocol):
    """A task that measures how well a text is predicted, in cells ``{"start", "end"}``: positions in [start, end)."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def text(self) -> str:
        """What is predicted, in windows of the longest length."""
        ...

    def cells(self, lengths: Sequence[int]) -> Sequence[Mapping[str, int | float]]:
        """Return the ranges of positions up to the longest of `lengths` (tokens)."""
        ...

    def window_starts(self, tokens: int, length: int, samples: int) -> Ints:
        """Return the first token of each window: at most `samples` of `length` tokens, of a text of `tokens`."""
        ...


Task = RecallTask | ChoiceTask | PositionTask

_TASKS: dict[str, type[Any]] = {}
TRAINING_SOURCES: dict[str, type[TrainingSource]] = {}
"""What a training recipe calls a source -> its dataclass, of the tasks that declare one."""


def register(task: type[Any]) -> None:
    """Make a task class (a dataclass with a class variable `name`) known under its name.

    Raises ValueError (a programming error) for a name, a training source or a flag that is taken.
    """
    name = task.name
    if name in _TASKS:
        raise ValueError(f"task {name!r} is registered twice: {_TASKS[name].__qualname__} and {task.__qualname__}")
    declared = declaration_of(task)
    for other, theirs in ((known, declaration_of(known)) for known in _TASKS.values()):
        taken = {flag.name for flag in theirs.flags} & {flag.name for flag in declared.flags}
        if taken and theirs.flags != declared.flags:
            raise ValueError(f"task {name!r} declares {', '.join(sorted(taken))}, which {other.name!r} has already")
    if declared.source is not None:
        register_source(declared.source)
    _TASKS[name] = task


def register_source(source: type[TrainingSource]) -> None:
    """Make a training source known under its kind, also one that several tasks share; ValueError for a taken kind."""
    if source.kind in TRAINING_SOURCES:
        raise ValueError(f"training source {source.kind!r} is registered twice")
    TRAINING_SOURCES[source.kind] = source


def declaration_of(task: Any) -> Declaration:
    """Return what a task (its name, its class, or an object of it) declares; an empty one for tasks of other makers."""
    own = getattr(_TASKS.get(task) if isinstance(task, str) else task, "declared", None)
    return own if isinstance(own, Declaration) else Declaration()


register(Phonebook)
register(Passkey)
register(BitsPerByte)
register(Copying)
register(Babilong)
register(InContext)
register(MetaICL)
register(QuestionAnswering)
register(SpokenPasskey)
for _needles in NEEDLES:
    register(_needles)
register_source(NeedleSource)


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks, in order of registration."""
    return tuple(_TASKS)


def task_class(name: str) -> type[Any]:
    """Return the class of the task `name`; an unknown name raises `UserError` with the nearest ones."""
    if name not in _TASKS:
        hint = did_you_mean(name, _TASKS, most=3)
        raise UserError(f'unknown task "{name}"; known tasks: {", ".join(_TASKS)}.{hint}')
    return _TASKS[name]


def report_parts(shares: bool) -> dict[str, ReportPart]:
    """Return task -> its part of a report, of those that measure shares of right answers, or of the others."""
    declared = {name: declaration_of(name).report for name in _TASKS}
    return {name: part for name, part in declared.items() if part is not None and part.shares == shares}


def wording_of(name: str) -> Wording:
    """Return what the task `name` is called and asks, in words; the bare name for tasks that say nothing of themselves.

    `name` is any task of a result or sweep file: the names of this registry, of the sequence tasks, of the harness.
    """
    own = getattr(_TASKS.get(name), "wording", None) or sequence_wording(name)
    return own if isinstance(own, Wording) else Wording(name, "")


def create_task(name: str, **options: Any) -> Task:
    """Return the task `name` with its options; unknown names and options raise `UserError` with the nearest."""
    fields = [field.name for field in dataclasses.fields(task_class(name))]
    for option in options:
        if option not in fields:
            raise UserError(
                f'task {name} has no option "{option}"; it has {", ".join(fields)}.{did_you_mean(option, fields)}'
            )
    task: Task = _TASKS[name](**options)
    return task
