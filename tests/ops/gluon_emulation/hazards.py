"""What a kernel must not do, and stand-ins that say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn


class Hazard(AssertionError):
    """On a GPU the kernel would read or write something else than it means to, at least now and then."""


class Names(SimpleNamespace):
    """Functions of one of Gluon's modules; what is not emulated fails by its name."""

    def __init__(self, called: str, **functions: Any) -> None:
        super().__init__(called=called, **functions)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{self.called}.{name} is not emulated: see tests/ops/gluon_emulation/language.py")
