"""Random noise (Buitrago Ruiz and Gu 2025, intervention 1)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states.base import BatchRows, RowChoice, filled_state
from longrecall.training.recipe_states import NoiseRecipe


class Noise:
    """Every number of the initial state is drawn from N(0, std^2), anew in every batch, with one std for all."""

    by_row: ClassVar[bool] = False
    continues: ClassVar[bool] = False

    def __init__(self, recipe: NoiseRecipe, model: RecurrentLM, rows: BatchRows) -> None:
        self._recipe, self._model = recipe, model
        self._rows = RowChoice(recipe, rows)

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return noise in the chosen rows, or None when there is none and no other process has rows."""
        chosen = self._rows.draw(text, row)
        noise = self._rows.noise(text, row, chosen)
        return filled_state(
            self._model,
            chosen,
            self._recipe.convolution,
            lambda index, name, empty: noise.like(empty).mul_(self._recipe.std),
            self._rows.shared,
        )

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """Forget it."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of batches begun: noise depends on it, the seed and the row alone."""
        return {"batches": torch.tensor(self._rows.batches)}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self._rows.batches = int(tensors["batches"])
