"""Options of tasks on the command line: the flags that they declare, and ``--option task.key=value`` for all others."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from longrecall.errors import UserError, did_you_mean
from longrecall.units import parse_length

_T = TypeVar("_T")
_PLACE = "flag_"
"""Before the names of tasks' flags in the parsed arguments, where another argument may have the same name."""


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that tasks declare, in a group for each set of them; several tasks may share one set."""
    from longrecall.tasks.registry import declaration_of, task_class, task_names

    owners: dict[Any, list[str]] = {}
    for name in task_names():
        if flags := declaration_of(name).flags:
            owners.setdefault(flags, []).append(name)
    for flags, names in owners.items():
        group = parser.add_argument_group(", ".join(names))
        defaults = {field.name: field.default for field in dataclasses.fields(task_class(names[0]))}
        for flag in flags:
            default = defaults[flag.option]
            several = isinstance(default, tuple)
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in _values(default))
            group.add_argument(
                flag.name,
                dest=_PLACE + flag.name,
                type=str if several else flag.read,
                metavar=flag.letter,
                help=flag.help + (f" [{shown}]" if shown else ""),
            )


def task_flags(args: argparse.Namespace, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return task -> option -> value of the flags that were given; those of tasks that are not asked for do nothing."""
    from longrecall.tasks.registry import declaration_of, task_class

    options: dict[str, dict[str, Any]] = {}
    for name in tasks:
        for flag in declaration_of(name).flags:
            value = getattr(args, _PLACE + flag.name)
            if isinstance(getattr(task_class(name), flag.option), tuple) and value is not None:
                value = tuple(split_values(value, flag.name, flag.read))
            if value is not None:
                options.setdefault(name, {})[flag.option] = value
    return options


def _values(default: Any) -> tuple[Any, ...]:
    return default if isinstance(default, tuple) else () if default is None else (default,)


def split_values(text: str, option: str, convert: Callable[[str], _T]) -> list[_T]:
    """Return the comma-separated values of an option."""
    values: list[_T] = []
    for part in (piece.strip() for piece in text.split(",")):
        try:
            values.append(convert(part))
        except UserError as error:
            raise UserError(f"{option}: {error}") from None
        except ValueError:
            raise UserError(f'{option}: "{part}" is not a number; separate several with commas') from None
        if part == "":
            raise UserError(f"{option}: there is an empty entry in {text!r}")
    return values


def parse_task_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return task -> option -> value of ``task.key=value`` texts, values as the fields of the task's class ask for.

    Several values are separated by commas, ``none`` is None where a field may be None, and whole numbers may be lengths
    (``4k``). Raises `UserError` for another form, unknown names (with the nearest), an option given twice, and values
    that do not fit.
    """
    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        task, dot, key = name.strip().partition(".")
        if not (equals and dot and task and key):
            raise UserError(f'--option "{text}" is not of the form task.key=value, for example passkey.digits=7')
        kind = _field_type(task, key)
        if key in options.setdefault(task, {}):
            raise UserError(f"--option {task}.{key} is given twice; give it once")
        try:
            options[task][key] = _convert(value, kind)
        except (ValueError, TypeError) as error:
            raise UserError(f"--option {task}.{key}: {error}") from None
    return options


def _field_type(task: str, key: str) -> Any:
    from longrecall.evaluation.harness.task import PREFIX, HarnessTask
    from longrecall.tasks.registry import task_class

    found: Any = HarnessTask if task.startswith(PREFIX) else task_class(task)
    fields = [field.name for field in dataclasses.fields(found) if field.name != "name"]
    if key not in fields:
        raise UserError(
            f'--option {task}.{key}: task {task} has no option "{key}"; it has {", ".join(fields)}.'
            f"{did_you_mean(key, fields)}"
        )
    return typing.get_type_hints(found)[key]


def _convert(text: str, kind: Any) -> Any:
    """Return `text` as a value of type `kind`; raise ValueError that says what is wrong."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in parts and text.strip().lower() == "none":
            return None
        return _convert(text, next(part for part in parts if part is not type(None)))
    if origin is tuple:
        pieces = text.split(",")
        if parts[-1] is Ellipsis:
            return tuple(_convert(piece, parts[0]) for piece in pieces)
        if len(pieces) != len(parts):
            raise ValueError(f'"{text}" must be {len(parts)} values, separated by commas')
        return tuple(_convert(piece, part) for piece, part in zip(pieces, parts, strict=True))
    if kind is bool:
        if text.strip().lower() not in ("true", "false"):
            raise ValueError(f'"{text}" must be true or false')
        return text.strip().lower() == "true"
    if kind is int:
        return _integer(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f'"{text}" is not a number') from None
    if kind is str:
        return text.strip()
    raise ValueError("an option of this type can only be given from Python")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return parse_length(text)
    except UserError:
        raise ValueError(f'"{text}" is not a whole number') from None
