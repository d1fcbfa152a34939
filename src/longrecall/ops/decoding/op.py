"""The recurrences of one decoding step in kernels, and their kernels for Hopper.

The step of a layer calls the kernels itself (triton/recurrence.py). A layer that they cannot serve decodes by its
forward pass on one token, in plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longrecall.ops import hopper_kernels
from longrecall.ops.backends import TRITON, Choice, Inputs, Op, declare, never_slow
from longrecall.ops.hopper_kernels import HopperKernel

KEYS = (64, 128, 256, 512)
"""Keys of a state that the kernels for Hopper are built for."""

VALUES = 64
"""Values of a state come in multiples of these: rows of a tile fill lines of 128 bytes."""

RECURRENT_STEP = declare(Op("recurrent_step", kernels="decoding.triton.recurrence", slow=never_slow))
"""Its input is `state` ``[B, H, K, V]``. For one token the state decays, is written to and is read."""


def _sizes(keys: int, values: int, states: int, processors: int) -> str | None:
    # Rounded up: the last tile of the Triton kernel may be narrower.
    if states * -(-values // VALUES) <= processors:
        return f"{states} states are too few for {processors} multiprocessors"
    if keys not in KEYS or values % VALUES:
        known = ", ".join(map(str, KEYS))
        return f"states must have {known} keys and a multiple of {VALUES} values, not {keys} x {values}"
    return None


def _sizes_of(inputs: Inputs, _: Mapping[str, Any]) -> dict[str, Any]:
    from longrecall.ops.kernels.launch import processors

    state = inputs["state"]
    assert state is not None
    B, H, K, V = state.shape
    return {"keys": K, "values": V, "states": B * H, "processors": processors(state)}


STEP = hopper_kernels.declare(HopperKernel("step on many states", ("recurrent_step",), _sizes, _sizes_of))


def step_choice(state: torch.Tensor) -> Choice:
    """What a step in kernels takes for a state ``[B, H, K, V]``, which may be without memory."""
    return Choice(RECURRENT_STEP.name, TRITON, {}, hopper_kernels.inside(RECURRENT_STEP.name, {"state": state}, {}))
