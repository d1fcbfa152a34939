"""Triton's CPU interpreter, quicker: the language is made ready once for each launch of a kernel.

As it comes, the interpreter looks through all names of `triton.language` whenever one jit function calls another,
thousands of times in a launch, and finds each time that they are ready: more than half of what a launch takes.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest


def prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's preparation; do nothing without Triton, or where it has none by this name."""
    if find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    prepare = getattr(interpreter, "_patch_lang", None)
    if prepare is None:
        return
    # Functions of triton.language itself look their names up in its core.
    everything = SimpleNamespace(__globals__={"language": language, "core": language.core})
    running: list[Any] = []

    def prepare_first(function: Any) -> Any:
        if running:
            return SimpleNamespace(restore=lambda: None)
        running.append(prepare(everything))
        return SimpleNamespace(restore=lambda: running.pop().restore())

    patch.setattr(interpreter, "_patch_lang", prepare_first)
