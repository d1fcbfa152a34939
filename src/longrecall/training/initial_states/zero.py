"""No intervention."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from longrecall.models.state import RecurrentState


class Zero:
    """Every sequence starts from the zero state: plain training."""

    by_row: ClassVar[bool] = True
    continues: ClassVar[bool] = False

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return None."""
        return None

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """Forget it."""

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing is carried."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Nothing is carried."""
