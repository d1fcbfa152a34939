"""Checks that the values of recipes and tasks share; each raises a `UserError` that names the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from longrecall.errors import UserError, did_you_mean


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f'{name} "{value}" is none of {", ".join(choices)}.{did_you_mean(value, choices)}')


def positive(section: Any, *names: str) -> None:
    """Raise UserError unless these fields of a section are finite and above 0."""
    for name in names:
        if not getattr(section, name) > 0 or not math.isfinite(getattr(section, name)):
            raise UserError(f"{name} must be above 0, got {getattr(section, name)}")


def share(section: Any, *names: str) -> None:
    """Raise UserError unless these fields of a section lie in [0, 1]."""
    for name in names:
        if not 0.0 <= getattr(section, name) <= 1.0:
            raise UserError(f"{name} must be a share between 0 and 1, got {getattr(section, name)}")


def check_weight(weight: float) -> None:
    """Raise UserError unless `weight`, of a source of training sequences, is finite and above 0."""
    if not weight > 0 or not math.isfinite(weight):
        raise UserError(f"weight must be above 0, got {weight}; leave a source out to switch it off")
