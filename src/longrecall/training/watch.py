"""Stopping at the first loss or gradient that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.errors import UserError

MOST_PENDING = 64


@dataclass(frozen=True)
class _Seen:
    what: str
    step: int
    place: str
    value: Tensor


class FiniteWatch:
    """Collects scalars and raises UserError, naming step and data, when one of them is not finite.

    On the CPU every value is looked at as it comes. On a GPU that would stop the queue of kernels at every step, so
    values wait until `check` is called (before every log line and checkpoint) or `MOST_PENDING` have gathered.
    """

    def __init__(self) -> None:
        self._pending: list[_Seen] = []
        self.last_good = "none yet"
        self.before_error: Callable[[], None] = lambda: None
        """Called before the error: lets a checkpoint that is being written become the last good one."""

    def see(self, what: str, step: int, place: str, value: Tensor) -> None:
        """Take the scalar `value` ("loss", "gradient norm") of 1-based `step`, computed from the data at `place`."""
        self._pending.append(_Seen(what, step, place, value.detach()))
        if value.device.type == "cpu" or len(self._pending) >= MOST_PENDING:
            self.check()

    def check(self) -> None:
        """Look at everything that waits."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        finite = torch.isfinite(torch.stack([seen.value.float() for seen in pending]))
        if bool(finite.all()):
            return
        bad = pending[int(finite.to(torch.int8).argmin())]
        self.before_error()
        raise UserError(
            f"the {bad.what} is {float(bad.value)} in step {bad.step} ({bad.place}); last good checkpoint: "
            f"{self.last_good}; lower optimizer.learning_rate or optimizer.touched, or look at that data"
        )


def describe_place(origins: Sequence[str], first: int, rank: int, most: int = 2) -> str:
    """Say which data a batch was made of: the numbers of its sequences and the first few origins."""
    distinct = list(dict.fromkeys(origins))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    numbers = f"sequences {first}-{first + len(origins) - 1} of process {rank}"
    return f"data: {numbers}: {'; '.join(distinct[:most])}{more}"
