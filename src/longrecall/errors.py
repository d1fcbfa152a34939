"""The one exception that users are meant to read, and the helper that suggests a nearby name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input from outside: one line that says what, where and what to do. The CLI exits with code 2 on it."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the choice nearest to `name`, or an empty string when none is near."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
