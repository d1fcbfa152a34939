"""Names of sequence tasks -> their classes. A new one joins with one line of the table."""

from __future__ import annotations

import dataclasses
from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.mad import TASKS as MAD_TASKS
from longrecall.tasks.mqar import Mqar
from longrecall.tasks.sequences import SequenceTask
from longrecall.tasks.wording import Wording

_TASKS: dict[str, type[Any]] = {task.name: task for task in (Mqar, *MAD_TASKS)}


def sequence_task_names() -> tuple[str, ...]:
    """Return the names of all sequence tasks, in the order of the table."""
    return tuple(_TASKS)


def sequence_wording(name: str) -> Wording | None:
    """Return what the sequence task `name` is called and asks, in words; None for an unknown name."""
    return _TASKS[name].wording if name in _TASKS else None


def create_sequence_task(name: str, **settings: Any) -> SequenceTask:
    """Return the sequence task `name` with its settings; unknown names and settings raise `UserError`."""
    if name not in _TASKS:
        hint = did_you_mean(name, _TASKS, most=3)
        raise UserError(f'unknown sequence task "{name}"; known ones: {", ".join(_TASKS)}.{hint}')
    fields = [field.name for field in dataclasses.fields(_TASKS[name])]
    for setting in settings:
        if setting not in fields:
            raise UserError(
                f'{name} has no setting "{setting}"; it has {", ".join(fields)}.{did_you_mean(setting, fields)}'
            )
    task: SequenceTask = _TASKS[name](**settings)
    return task
