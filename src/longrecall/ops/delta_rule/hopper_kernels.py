"""The delta rule's kernels for Hopper: for which sizes each of them replaces a Triton kernel.

They are launched by triton/chunked.py, through hopper/walks.py where they walk along the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.ops.delta_rule.widths import built_width
from longrecall.ops.hopper_kernels import HopperKernel, Inputs, declare

OPS = ("gated_delta_rule", "subhead_delta_rule", "expanded_delta_rule")

WIDTH = 128
"""Key and value channels of the states that the walks and the gradients of the keys are built for."""

FEWEST = 3
"""A walk forward is faster from one state for every three multiprocessors on; measured on an H200."""


def _any_sizes() -> str | None:
    return None


def _widths(keys: int, values: int) -> str | None:
    if keys == values == WIDTH:
        return None
    return f"states must have {WIDTH} keys and {WIDTH} values, not {keys} x {values}"


def _enough_states(keys: int, values: int, states: int, processors: int) -> str | None:
    """A program holds a whole state. The Triton kernel cuts states and text, and so keeps more of a GPU busy."""
    if states * FEWEST <= processors:
        return f"{states} states are too few for {processors} multiprocessors"
    return _widths(keys, values)


def _no_sizes(_: Inputs, __: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _widths_of(inputs: Inputs, _: Mapping[str, Any]) -> dict[str, Any]:
    q, v = inputs["q"], inputs["v"]
    assert q is not None and v is not None
    return {"keys": built_width(q.shape[3]), "values": built_width(v.shape[3])}


def _states_of(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Any]:
    from longrecall.ops.kernels.launch import processors

    beta = inputs["beta"]
    assert beta is not None
    states = beta.shape[0] * beta.shape[2]
    return {**_widths_of(inputs, options), "states": states, "processors": processors(beta)}


INVERSE = declare(HopperKernel("inverse of a chunk", OPS, _any_sizes, _no_sizes))
WALK = declare(HopperKernel("walk forward", OPS, _enough_states, _states_of))
WALK_BACK = declare(HopperKernel("walk back", OPS, _widths, _widths_of))
KEYS = declare(HopperKernel("gradients of queries and keys", OPS, _widths, _widths_of))
