"""What some families do to the logits after the head: a multiplier, a soft cap."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogitScale(NamedTuple):
    """cap * tanh(multiplier * logits / cap), without the cap where it is None."""

    multiplier: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` as the head makes them -> as the model returns them, in their dtype."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.soft_cap is not None:
            logits = (logits / self.soft_cap).tanh() * self.soft_cap
        return logits
