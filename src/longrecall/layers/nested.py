"""Mixers inside mixers: several paths over the same input, each with its own part of the state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from longrecall.layers.mixers.base import LayerState, state_under
from longrecall.layers.passed import Carried, taken_arguments, taken_names
from longrecall.layers.tokens import TokenContext, token_argument


def read_nested(
    owner: Any,
    paths: Iterable[str],
    x: Tensor,
    state: LayerState | None,
    *,
    mask: Tensor | None,
    position: Tensor,
    context: TokenContext | None,
    carried: Carried | None = None,
) -> tuple[list[Tensor], LayerState]:
    """Run the mixers that `owner` has under the names `paths`, described under the same names in `owner.config`.

    x ``[B, T, d]`` -> an output ``[B, T, d]`` for each, and their states with the name and a dot in front. `context`
    goes to those that look up tokens, of `carried` what they take (layers/passed.py).
    """
    outputs: list[Tensor] = []
    new_state: LayerState = {}
    for path in paths:
        config = getattr(owner.config, path)
        more = {**token_argument(config, context), **taken_arguments(taken_names(config), carried)}
        y, after = getattr(owner, path)(x, state_under(state, path), mask=mask, position=position, **more)
        outputs.append(y)
        new_state.update({f"{path}.{name}": tensor for name, tensor in after.items()})
    return outputs, new_state
