"""What every token mixer promises: `mixer(x, state) -> (y, new_state)`, made from a checked description."""

from __future__ import annotations

from torch import Tensor

from longrecall.layers.descriptions.base import MixerConfig as MixerConfig
from longrecall.layers.descriptions.base import StateShapes as StateShapes
from longrecall.layers.stepping.step import part_under

LayerState = dict[str, Tensor]

AUXILIARY_LOSS = "auxiliary_loss"
"""Key under which a mixer may put a scalar loss of its own beside its new state; the model takes it out again."""


def without_auxiliary_losses(state: LayerState) -> tuple[LayerState, list[Tensor]]:
    """What a mixer returned -> its new state alone, and the losses that it or mixers inside it put there."""
    losses = [tensor for name, tensor in state.items() if _is_loss(name)]
    return ({name: t for name, t in state.items() if not _is_loss(name)} if losses else state), losses


def _is_loss(name: str) -> bool:
    # Nested mixers put a path before their names.
    return name.rpartition(".")[2] == AUXILIARY_LOSS


def state_under(state: LayerState | None, path: str) -> LayerState | None:
    """The part of a nested layer's state whose names begin with ``path.``, without that; None without a state."""
    return None if state is None else part_under(state, path)
