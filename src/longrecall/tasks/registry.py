"""Names of tasks -> their classes. A new task joins with one `register` line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.babilong import Babilong
from longrecall.tasks.bits_per_byte import BitsPerByte
from longrecall.tasks.copying import Copying
from longrecall.tasks.encoding import Cell, PieceEncoder, QuestionSample, Sample
from longrecall.tasks.passkey import Passkey
from longrecall.tasks.phonebook import Phonebook


class RecallTask(Protocol):
    """A task whose samples hold answers that are right or wrong.

    One that also counts single tokens of its answers says so with a class variable `token_metric`, the metric's name.
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


Task = RecallTask | BitsPerByte

_TASKS: dict[str, type[Any]] = {}


def register(task: type[Any]) -> None:
    """Make a task class (a dataclass with a class variable `name`) known under its name; a taken name is refused."""
    name = task.name
    if name in _TASKS:
        raise ValueError(f"task {name!r} is registered twice: {_TASKS[name].__qualname__} and {task.__qualname__}")
    _TASKS[name] = task


register(Phonebook)
register(Passkey)
register(BitsPerByte)
register(Copying)
register(Babilong)


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks, in order of registration."""
    return tuple(_TASKS)


def create_task(name: str, **options: Any) -> Task:
    """Return the task `name` with its options; unknown names and options raise `UserError` with the nearest."""
    if name not in _TASKS:
        raise UserError(f'unknown task "{name}"; known tasks: {", ".join(_TASKS)}.{did_you_mean(name, _TASKS)}')
    fields = [field.name for field in dataclasses.fields(_TASKS[name])]
    for option in options:
        if option not in fields:
            raise UserError(
                f'task {name} has no option "{option}"; it has {", ".join(fields)}.{did_you_mean(option, fields)}'
            )
    task: Task = _TASKS[name](**options)
    return task
