"""A learned initial state: one trainable s0 for all sequences, alone (state tuning) or with the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from longrecall.errors import UserError
from longrecall.layers.mixers.base import LayerState
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states.base import BatchRows, RowChoice, keep_rows, takes_part
from longrecall.training.optimizer import INITIAL_STATE
from longrecall.training.recipe_states import LearnedRecipe
from longrecall.training.sending import send

FINISHED_PATH = "new."
"""What a handover layer calls the state of the path that stays."""


def learned_shapes(recipe: LearnedRecipe, config: RecurrentConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape, without a batch dimension, of the trainable state of a model.

    Raises:
        UserError: the model has no recurrent layer.
    """
    shapes = {
        parameter_name(index, name): tuple(shape)
        for index, layer in enumerate(config.layer_configs())
        for name, shape in layer.state_shapes().items()
        if takes_part(name, recipe.convolution)
    }
    if not shapes:
        raise UserError('initial_state.kind "learned" needs a recurrent layer; the model has attention layers only')
    return shapes


def parameter_name(layer: int, name: str) -> str:
    """Return the parameter's name, as in `named_parameters` of the model while it trains; dots are for modules."""
    return f"{INITIAL_STATE}{layer}/{name.replace('.', '/')}"


class Learned:
    """Every sequence starts from the same trained state (zeros at first: the model as it was).

    The state is a module of the model while it trains, so that data parallelism, clipping and the optimizer see it;
    `release` takes it away again. With `freeze` the weights need no gradient.

    Raises:
        UserError: the model has no recurrent layer.
    """

    by_row: ClassVar[bool] = False
    continues: ClassVar[bool] = False

    def __init__(self, recipe: LearnedRecipe, model: RecurrentLM, rows: BatchRows) -> None:
        self._recipe, self._model = recipe, model
        self._rows = RowChoice(recipe, rows)
        if recipe.freeze:
            model.requires_grad_(False)
        shapes = learned_shapes(recipe, model.config)
        # float32 whatever the weights are: the steps of AdamW would be lost in bfloat16.
        wide = torch.float64 if model.dtype == torch.float64 else torch.float32
        self._parameters = nn.ParameterDict(
            {
                name.removeprefix(INITIAL_STATE): nn.Parameter(torch.zeros(shape, device=model.device, dtype=wide))
                for name, shape in shapes.items()
            }
        )
        model.add_module(INITIAL_STATE.rstrip("."), self._parameters)

    def release(self) -> None:
        """Make the model what it was, but for its trained weights; the state stays here."""
        if hasattr(self._model, INITIAL_STATE.rstrip(".")):
            delattr(self._model, INITIAL_STATE.rstrip("."))

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return the trainable state in the chosen rows; zeros, but with its gradient, in the others.

        Data parallelism waits for the gradient of every parameter, so a batch without a chosen row needs one too.
        """
        chosen = self._rows.draw(text, row)
        zero = self._model.zero_state(len(text))
        keep = send(chosen, zero.position.device)
        layers = tuple(
            {name: self._expanded(index, name, empty, keep) for name, empty in layer.items()}
            for index, layer in enumerate(zero.layers)
        )
        return replace(zero, layers=layers)

    def start(self, rows: int) -> RecurrentState:
        """Return the trained state in so many rows, all of them; nothing is drawn."""
        zero = self._model.zero_state(rows)
        keep = torch.ones(rows, dtype=torch.bool, device=zero.position.device)
        layers = tuple(
            {name: self._expanded(index, name, empty, keep) for name, empty in layer.items()}
            for index, layer in enumerate(zero.layers)
        )
        return replace(zero, layers=layers)

    def _expanded(self, index: int, name: str, empty: Tensor, keep: Tensor) -> Tensor:
        if not takes_part(name, self._recipe.convolution):
            return empty
        parameter = self._parameters[parameter_name(index, name).removeprefix(INITIAL_STATE)]
        return keep_rows(parameter.to(empty.dtype).expand(empty.shape), keep, empty)

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """Forget it."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained state by parameter name and the number of batches begun."""
        learned = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return {"batches": torch.tensor(self._rows.batches), **learned}

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self._rows.batches = int(tensors["batches"])
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])

    def save(self, path: Path, zero: RecurrentState, fingerprint: str) -> None:
        """Write the state, one row that has read nothing, for `RecurrentState.load` and ``generate --load-state``.

        Args:
            path: a safetensors file.
            zero: the zero state, of one row, of the trained model as it was written, without handover layers.
            fingerprint: of that model, which alone opens the file.

        Raises:
            UserError: the place cannot be written.
        """
        layers: list[LayerState] = []
        for index, layer in enumerate(zero.layers):
            kept = dict(layer)
            for name, empty in layer.items():
                for source in (name, FINISHED_PATH + name):
                    key = parameter_name(index, source).removeprefix(INITIAL_STATE)
                    if key in self._parameters:
                        kept[name] = self._parameters[key].detach()[None].to(empty)
            layers.append(kept)
        replace(zero, layers=tuple(layers)).save(path, fingerprint)
