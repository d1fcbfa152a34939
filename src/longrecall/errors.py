"""The one exception that users are meant to read, what memory errors look like, and how a nearby name is suggested."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "CUDA error: out of memory")


class UserError(ValueError):
    """Bad input from outside: one line that says what, where and what to do. The CLI exits with code 2 on it."""


class RefusedTogether(UserError):
    """Bad input that all processes of a run have agreed to stop for; they all exit with code 2, and one says why.

    Attributes:
        told_here: this process is the one that prints the line.
    """

    def __init__(self, line: str, told_here: bool) -> None:
        super().__init__(line)
        self.told_here = told_here


def first_line(error: BaseException) -> str:
    """The first line of what an error of somebody else says; the name of its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_process() -> bool:
    """Whether this is the first of the processes that a launcher such as torchrun has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory, the machine's or a GPU's, did not suffice.

    It is told without torch: a GPU's error by the name of its class; those of a CPU's allocator, of the system and of
    a GPU's driver, which have none of their own, by their words.
    """
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(words in str(error) for words in _NO_MEMORY)


def did_you_mean(name: str, choices: Iterable[str], most: int = 1, cutoff: float = 0.5) -> str:
    """Return ``' Did you mean "x"?'`` for the choice nearest to `name`, or an empty string when none is near.

    `most` choices are named at most, the nearest first; `cutoff` is how alike they must be, from 0 to 1.
    """
    near = difflib.get_close_matches(name, list(choices), n=most, cutoff=cutoff)
    named = " or ".join(f'"{choice}"' for choice in near)
    return f" Did you mean {named}?" if near else ""
