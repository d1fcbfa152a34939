"""What every token mixer promises: `mixer(x, state) -> (y, new_state)`, made from a checked description."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from longrecall.layers.descriptions.base import MixerConfig as MixerConfig
from longrecall.layers.descriptions.base import StateShapes as StateShapes
from longrecall.layers.stepping.step import part_under

LayerState = dict[str, Tensor]

AUXILIARY_LOSS = "auxiliary_loss"
"""Key under which a mixer may put a scalar loss of its own beside its new state; the model takes it out again."""

_unread: ContextVar[bool] = ContextVar("unread_states", default=False)


@contextlib.contextmanager
def unread_states() -> Iterator[None]:
    """Inside, nobody reads on from the new states: a mixer may leave out what takes time of its own to compute."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def as_states_are_read_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose later calls (a checkpoint's, in the backward) find states as read or unread as they are now."""
    if torch.compiler.is_compiling():
        return function
    unread = _unread.get()

    def call(*args: Any) -> Any:
        token = _unread.set(unread)
        try:
            return function(*args)
        finally:
            _unread.reset(token)

    return call


def states_are_unread() -> bool:
    """Whether the caller is inside of `unread_states`; never where torch.compile traces, which would break there."""
    return not torch.compiler.is_compiling() and _unread.get()


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
