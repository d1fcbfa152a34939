"""The losses of the steps since the last line of the log: the whole one, and the parts of it that have a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

SUMS = {"loss": "loss_sum", "auxiliary_loss": "auxiliary_sum", "leash_loss": "leash_sum"}
"""Column of the log -> what a resumable checkpoint calls its sum, of one process; the log says the mean over them."""


class LossSums:
    """Sums on the device that are read once a log line."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, share: Tensor, **losses: Tensor) -> None:
        """Add to each column the `share` of a step that a micro-batch is, times its mean loss."""
        for name, loss in losses.items():
            own = loss.detach() * share
            self._sums[name] = own if name not in self._sums else self._sums[name] + own

    def take(self, steps: int, mean_of: Callable[[Tensor], float]) -> dict[str, float]:
        """Return column -> mean over so many steps, and begin anew.

        Args:
            steps: since the last call.
            mean_of: the mean of a number that every process has; all of them call this.
        """
        means = {name: mean_of(self._sums[name]) / steps for name in SUMS if name in self._sums}
        self._sums = {name: torch.zeros_like(total) for name, total in self._sums.items()}
        return {"loss": 0.0} | means

    def state(self) -> dict[str, Tensor]:
        """Return what `restore` needs to go on."""
        return {SUMS[name]: total for name, total in self._sums.items()}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from what `state` returned, which may lie among other tensors."""
        self._sums = {name: tensors[own].to(device) for name, own in SUMS.items() if own in tensors}
