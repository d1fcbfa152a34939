"""Truncated backpropagation through time (Buitrago Ruiz and Gu 2025, intervention 4)."""

from __future__ import annotations

from dataclasses import replace
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
    filled_state,
    keep_rows,
    own_copy,
    pack_layers,
    takes_part,
    unpack_layers,
    without_rows,
)
from longrecall.training.recipe_states import TruncatedBpttRecipe
from longrecall.training.sending import send


class TruncatedBptt:
    """Row i goes on in its text from the state, without gradient, in which it stopped reading it.

    With a stream made for it (``BatchStream(..., continued=True)``) this reads documents of any length as one, with
    gradients cut at the ends of the rows. A row that holds a task for once starts from zero, and what it has carried
    waits until its text comes back. The position goes on too: rotary keys keep their true distance. The caches of
    attention layers start empty in every batch, unless the recipe gives them an `attention_window`.
    """

    by_row: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    def __init__(self, recipe: TruncatedBpttRecipe, model: RecurrentLM, rows: BatchRows) -> None:
        self._recipe, self._model = recipe, model
        self._rows = RowChoice(recipe, rows)
        self._window = AttentionWindow(model, recipe.attention_window)
        self._carried: tuple[LayerState, ...] | None = None
        self._position = torch.zeros(0, dtype=torch.long)
        self._text: Tensor | None = None

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return what each row of text has carried; zeros for tasks and for rows that the probability leaves out."""
        self._text = text
        chosen, carried = self._rows.draw(text, row) & text.cpu(), self._carried
        if carried is None:
            return None
        if len(self._position) != len(text):
            raise ValueError(f"the batch has {len(text)} rows, but the states of {len(self._position)} are carried")
        state = filled_state(
            self._model, chosen, self._recipe.convolution, lambda index, name, empty: carried[index][name]
        )
        if state is None:
            return None
        state = replace(state, position=keep_rows(self._position, send(chosen, self._position.device)))
        return self._window.given(state, carried, self._position, chosen)

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """Keep where each row of text stopped; rows of tasks keep what they had."""
        if self._text is None:
            raise RuntimeError("after_batch comes after before_batch")
        text = send(self._text, final.position.device)
        every, old = bool(self._text.all()), self._carried
        layers: list[LayerState] = []
        windows = self._window.newest(final.layers)
        for index, layer in enumerate(final.layers):
            kept = {name: t.detach() for name, t in layer.items() if takes_part(name, self._recipe.convolution)}
            kept = own_copy(kept) if lent else apart_from_text(kept)
            kept |= windows[index]
            if not every and old:
                kept = {name: keep_rows(t, text, old[index][name]) for name, t in kept.items()}
            layers.append(kept if every or old else without_rows(kept, text))
        self._position = keep_rows(final.position, text, self._position if old is not None else None)
        self._carried = tuple(layers)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the carried tensors as ``carried.{layer}.{name}``, the positions and the number of batches begun."""
        own = {"batches": torch.tensor(self._rows.batches), "position": self._position.clone()}
        return own | pack_layers("carried", self._carried or ())

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`, on the model's device."""
        self._rows.batches = int(tensors["batches"])
        self._position = tensors["position"].to(self._model.device)
        self._carried = unpack_layers("carried", tensors, self._model)
