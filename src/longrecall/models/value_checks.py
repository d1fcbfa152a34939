"""Values of a config.json that no model can be built from, whatever its layers are: wrong types, impossible sizes.

What a mixer itself knows about its sizes (one must divide the other) is checked by its own config.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, get_args, get_type_hints

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import MIXERS
from longrecall.models.limits import check_count

LARGEST = 1e18
"""No other number is larger in size: beyond it whole numbers do not fit what torch takes."""

_POSITIVE = ("norm_eps", "rope_theta", "gate_divisor", "qk_norm_eps", "scale", "key_multiplier", "soft_cap")
"""Fields that a layer divides by or takes a root of, and factors of scores."""


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise UserError unless `value` is a whole number from `least` to the limit of `name`; true, false are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number from {least}"
        raise UserError(f'"{name}" is {value!r}; it must be {kind}')
    check_count(name, value)


def check_number(name: str, value: object, *, positive: bool = False) -> None:
    """Raise UserError unless `value` is a number of at most `LARGEST` in size, above 0 where `positive`."""
    if not _is_number(value) or (positive and value <= 0):
        raise UserError(f'"{name}" is {value!r}; it must be a finite number{" above 0" if positive else ""}')


def check_flag(name: str, value: object) -> None:
    """Raise UserError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise UserError(f'"{name}" is {value!r}; it must be true or false')


def check_mixer_values(description: object) -> None:
    """Check the values of a mixer's plain description, and of those inside it, against the types of its fields.

    What is no mapping, has no known type or has unknown keys is left to `mixer_config`.

    Raises:
        UserError: a value of a wrong type, or a number that is NaN, infinite or out of range.
    """
    if not isinstance(description, Mapping) or "type" not in description:
        return
    kind = description["type"]
    if not isinstance(kind, str):
        raise UserError(f'the "type" of a mixer is {kind!r}; it must be a name, one of {", ".join(MIXERS)}')
    if kind not in MIXERS:
        return
    for name, types in _field_types(kind).items():
        value = description.get(name)
        if name not in description or (value is None and type(None) in types):
            continue
        if name in MIXERS[kind].nested:
            check_mixer_values(value)
            continue
        try:
            _check(name, value, types)
        except UserError as error:
            raise UserError(f'mixer "{kind}": {error}') from None


@functools.cache
def _field_types(kind: str) -> dict[str, tuple[Any, ...]]:
    """Name of each field of a mixer type -> the types that its value may have; a tuple's as ``(tuple,)``."""
    config = MIXERS[kind]
    hints = get_type_hints(config)
    found = {}
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        found[field.name] = (tuple,) if getattr(hint, "__origin__", None) is tuple else (get_args(hint) or (hint,))
    return found


def _check(name: str, value: object, types: tuple[Any, ...]) -> None:
    if bool in types:
        check_flag(name, value)
    elif int in types:
        check_whole(name, value, least=0)
    elif float in types:
        check_number(name, value, positive=name in _POSITIVE)
    elif tuple in types:
        _check_limits(name, value) if name.endswith("limit") else _check_numbers(name, value)
    elif str in types and not isinstance(value, str):
        raise UserError(f'"{name}" is {value!r}; it must be text')


def _check_numbers(name: str, value: object) -> None:
    """A list of numbers; how many there must be is known to the mixer."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(_is_number(each) for each in value):
        raise UserError(f'"{name}" is {value!r}; it must be a list of finite numbers')


def _check_limits(name: str, value: object) -> None:
    """A lower and an upper limit; the upper one may be as large as it likes, infinite, or null."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not (_is_real(pair[0]) and (pair[1] is None or _is_real(pair[1]))):
        raise UserError(f'"{name}" is {value!r}; it must be two numbers, a lower and an upper limit')
    if not _is_number(pair[0]):
        raise UserError(f'"{name}" is {value!r}; the lower limit must be at most {LARGEST:g} in size')
    if pair[1] is not None and pair[0] > pair[1]:
        raise UserError(f'"{name}" is {value!r}; it must be two numbers, a lower and an upper limit in this order')


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is not itself


def _is_number(value: object) -> TypeGuard[float]:
    return _is_real(value) and abs(value) <= LARGEST
