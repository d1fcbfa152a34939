"""A promise about a chain of kernels, with which each may read what it can while the one before it is still at work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_promised: ContextVar[bool] = ContextVar("reading_ahead", default=False)


@contextlib.contextmanager
def reading_ahead() -> Iterator[None]:
    """Inside, no kernel writes a weight or a state that the kernel launched right after it reads.

    What was written before is safe once one ordinary kernel, of torch for instance, was launched since.
    """
    token = _promised.set(True)
    try:
        yield
    finally:
        _promised.reset(token)


def is_promised() -> bool:
    """Whether `reading_ahead` holds here."""
    return _promised.get()
