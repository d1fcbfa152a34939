"""State passing (Buitrago Ruiz and Gu 2025, intervention 3): the final state of an unrelated sequence."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from longrecall.layers.mixers.base import LayerState
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState, apart_from_text
from longrecall.training.initial_states.base import (
    AttentionWindow,
    BatchRows,
    RowChoice,
    clip_heads,
    filled_state,
    is_recurrent,
    own_copy,
    pack_layers,
    takes_part,
    unpack_layers,
)
from longrecall.training.recipe_states import StatePassingRecipe


class StatePassing:
    """Row i of a batch starts from the final state of row i of the previous, unrelated batch, without its gradient.

    Each row gets the state with the recipe's probability, else zeros. The recurrent state is passed, the state of the
    short convolutions too unless the recipe says no; `clip_norm` limits the Frobenius norm of each head's state.
    Attention layers start empty, unless the recipe gives them an `attention_window`: then positions go on too.
    """

    by_row: ClassVar[bool] = True
    continues: ClassVar[bool] = False

    def __init__(self, recipe: StatePassingRecipe, model: RecurrentLM, rows: BatchRows) -> None:
        self._recipe, self._model = recipe, model
        self._rows = RowChoice(recipe, rows)
        self._window = AttentionWindow(model, recipe.attention_window)
        self._carried: tuple[LayerState, ...] | None = None
        self._position = torch.zeros(0, dtype=torch.long)

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return the passed state, or None in the first batch and when no row gets one."""
        chosen, carried = self._rows.draw(text, row), self._carried
        if carried is None or any(t.shape[0] != len(text) for layer in carried for t in layer.values()):
            return None
        state = filled_state(
            self._model,
            chosen,
            self._recipe.convolution,
            lambda index, name, empty: carried[index][name],
            self._rows.shared,
        )
        return None if state is None else self._window.given(state, carried, self._position, chosen)

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """Keep what the next batch may start from."""
        apart = own_copy if lent else apart_from_text
        self._carried = tuple(
            apart(
                {
                    name: clip_heads(tensor.detach(), self._recipe.clip_norm if is_recurrent(name) else None)
                    for name, tensor in layer.items()
                    if takes_part(name, self._recipe.convolution)
                }
            )
            | window
            for layer, window in zip(final.layers, self._window.newest(final.layers), strict=True)
        )
        self._position = final.position.clone() if lent else final.position

    def state_dict(self) -> dict[str, Tensor]:
        """Return the carried tensors as ``carried.{layer}.{name}`` and the number of batches begun.

        Positions too, where they go on.
        """
        own = {"batches": torch.tensor(self._rows.batches)}
        own |= {"position": self._position.clone()} if self._window.tokens else {}
        return own | pack_layers("carried", self._carried or ())

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`, on the model's device."""
        self._rows.batches = int(tensors["batches"])
        if self._window.tokens:
            self._position = tensors["position"].to(self._model.device)
        self._carried = unpack_layers("carried", tensors, self._model)
