"""Interventions on the initial state: which recurrent state a training batch starts from.

An intervention sees final states go out of the model and says which state goes into the next batch. It belongs to one
process: with data parallelism every rank carries its own. Positions and attention caches are never passed on.
Source of state passing: "Understanding and Improving Length Generalization in Recurrent Models" (Buitrago Ruiz and Gu
2025), interventions 1-4; a new one is one class here, one dataclass in `recipe.py` and one `register` line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.layers.mixers.base import LayerState
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.recipe import AnyInitialState, StatePassingRecipe, ZeroState
from longrecall.training.sources import random_generator

PASSING_STREAM = 4


class InitialState(Protocol):
    """What the trainer asks before and after every forward pass (with gradient accumulation: every micro-batch)."""

    def before_batch(self, text: Tensor) -> RecurrentState | None:
        """Return the state the next batch starts from (None = zeros); `text` bool ``[B]``: the rows of running text."""

    def after_batch(self, final: RecurrentState) -> None:
        """See the state that the batch ended in (with its history of gradients)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that `load_state_dict` needs to continue exactly; no two entries share memory."""

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""


class Zero:
    """Every sequence starts from the zero state: plain training."""

    def before_batch(self, text: Tensor) -> RecurrentState | None:
        """Return None."""
        return None

    def after_batch(self, final: RecurrentState) -> None:
        """Forget it."""

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing is carried."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Nothing is carried."""


class StatePassing:
    """Row i of a batch starts from the final state of row i of the previous, unrelated batch, without its gradient.

    Each row gets the state with the recipe's probability, else zeros. The recurrent state is passed, the state of the
    short convolutions too unless the recipe says no; `clip_norm` limits the Frobenius norm of each head's state.
    """

    def __init__(self, recipe: StatePassingRecipe, model: RecurrentLM, seed: int, rank: int) -> None:
        self._recipe, self._model, self._seed, self._rank = recipe, model, seed, rank
        self._carried: tuple[LayerState, ...] | None = None
        self._batches = 0

    def before_batch(self, text: Tensor) -> RecurrentState | None:
        """Return the passed state, or None in the first batch and when no row gets one."""
        batch_size = len(text)
        draws = random_generator(self._seed, self._rank, self._batches, PASSING_STREAM).random(batch_size)
        self._batches += 1
        carried = self._carried
        if carried is None or any(tensor.shape[0] != batch_size for layer in carried for tensor in layer.values()):
            return None
        passed = torch.from_numpy(draws < self._recipe.probability)
        if self._recipe.text_only:
            passed = passed & text.cpu()
        if not bool(passed.any()):
            return None
        zero = self._model.zero_state(batch_size)
        if not bool(passed.all()):
            keep = passed.to(zero.position.device)
            carried = tuple({name: _keep_rows(tensor, keep) for name, tensor in layer.items()} for layer in carried)
        layers = tuple({**empty, **layer} for empty, layer in zip(zero.layers, carried, strict=True))
        return replace(zero, layers=layers)

    def after_batch(self, final: RecurrentState) -> None:
        """Keep what the next batch may start from."""
        self._carried = tuple(
            {name: self._prepare(name, tensor) for name, tensor in layer.items() if self._is_passed(name)}
            for layer in final.layers
        )

    def _is_passed(self, name: str) -> bool:
        """Names may carry a path (``old.recurrent``); convolution states end in conv (``q_conv``)."""
        kind = name.rpartition(".")[2]
        return kind == "recurrent" or (self._recipe.convolution and kind.endswith("conv"))

    def _prepare(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self._recipe.clip_norm is not None and name.endswith("recurrent"):
            norm = torch.linalg.vector_norm(tensor, dim=(-2, -1), keepdim=True)
            tensor = tensor * (self._recipe.clip_norm / norm.clamp(min=self._recipe.clip_norm))
        return tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Return the carried tensors as ``carried.{layer}.{name}`` and the number of batches begun."""
        tensors = {"batches": torch.tensor(self._batches)}
        for index, layer in enumerate(self._carried or ()):
            tensors |= {f"carried.{index}.{name}": tensor.clone() for name, tensor in layer.items()}
        return tensors

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`, on the model's device."""
        self._batches = int(tensors["batches"])
        layers: list[LayerState] = [{} for _ in range(self._model.config.num_hidden_layers)]
        found = False
        for name, tensor in tensors.items():
            prefix, _, rest = name.partition(".")
            if prefix == "carried":
                index, _, key = rest.partition(".")
                layers[int(index)][key] = tensor.to(self._model.device)
                found = True
        self._carried = tuple(layers) if found else None


def _keep_rows(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (tensor.ndim - 1)), tensor, torch.zeros_like(tensor))


Maker = Callable[[Any, RecurrentLM, int, int], InitialState]
"""(section of the recipe, model, seed, rank) -> intervention."""

_MAKERS: dict[type, Maker] = {}


def register(recipe: type, maker: Maker) -> None:
    """Say how the intervention of a recipe dataclass is made; ValueError (a programming error) when it is known."""
    if recipe in _MAKERS:
        raise ValueError(f"{recipe.__name__} has an intervention already")
    _MAKERS[recipe] = maker


def make_initial_state(recipe: AnyInitialState, model: RecurrentLM, seed: int, rank: int) -> InitialState:
    """Return the intervention that the recipe asks for; UserError when its kind has none."""
    if type(recipe) not in _MAKERS:
        raise UserError(f'initial_state.kind "{recipe.kind}" has no implementation in this version')
    return _MAKERS[type(recipe)](recipe, model, seed, rank)


register(ZeroState, lambda recipe, model, seed, rank: Zero())
register(StatePassingRecipe, StatePassing)
