"""Ends work from inside at a chosen forward pass, as Ctrl-C would; `tests.kills` ends processes from outside."""

from __future__ import annotations

from typing import Any

from longrecall import RecurrentLM


class Interrupter:
    """Counts forward passes of a model and interrupts it before pass number `after`."""

    def __init__(self, model: RecurrentLM, after: int) -> None:
        self.passes, self._after = 0, after
        self._hook = model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        if self.passes == self._after:
            raise KeyboardInterrupt
        self.passes += 1

    def __enter__(self) -> Interrupter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
