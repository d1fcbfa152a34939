"""The delta-rule layers on the kernels: everything between the projections, without repeated or expanded copies.

The plain path (layers/mixers/delta_net.py) is the definition; this one gives its numbers, rounded once more where
queries and keys stay in the model's dtype after their norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longrecall.layers.access import may_read
from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.expansion import HeadwiseExpansion
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer
from longrecall.ops.borders import inputs_of_previous, state_after, state_before
from longrecall.ops.delta_rule.expanded import EXPANDED_DELTA_RULE, expanded_delta_rule
from longrecall.ops.execution import context, states_are_unread
from longrecall.ops.padding import Newest, is_at_the_end, newest
from longrecall.ops.recurrence import SHORTEST_TRITON
from longrecall.ops.shapes import prepare_state

if TYPE_CHECKING:
    from longrecall.ops.delta_rule.triton.expanded import Heads

TAPS = 4
"""Width of the short convolutions that the kernels know."""


def why_not(layer: LinearAttentionMixer, x: Tensor, mask: Tensor | None, log_decay: Tensor | None) -> str | None:
    """Why a call of a layer takes the plain path and not the kernels, in words; None = it takes the kernels."""
    if reason := EXPANDED_DELTA_RULE.why_unasked(x):
        return reason
    if mask is not None and not is_at_the_end(mask):
        return "padded tokens are left to the plain path, but for those known to come last"
    if not x.shape[0]:
        return "a batch without rows is left to the plain path"
    if x.shape[1] < SHORTEST_TRITON:
        return f"sequences of fewer than {SHORTEST_TRITON} tokens are left to the plain path"
    for convolution in (layer.q_conv, layer.k_conv, layer.v_conv):
        if convolution is None or convolution.weight.shape[1] != TAPS or convolution.bias is not None:
            return f"the short convolutions must have {TAPS} taps and no bias"
        if not may_read(convolution, ShortConvolution):
            return "an adapter on the short convolutions, or hooks, are left to the plain path"
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    like = {name: x.new_empty((1, 1, 1, width), dtype=dtype) for name, width in _widths(layer).items()}
    state_heads = layer.v_proj.out_features // layer.value_width * layer.subheads
    like["beta"] = x.new_empty((x.shape[0], 1, state_heads), dtype=torch.float32)
    expands = _expansion(layer) is not None
    return EXPANDED_DELTA_RULE.why_plain({**like, "log_decay": log_decay}, expands=expands)


def _widths(layer: LinearAttentionMixer) -> dict[str, int]:
    return {"q": layer.head_width, "k": layer.head_width, "v": layer.value_width}


def _expansion(layer: LinearAttentionMixer) -> HeadwiseExpansion | None:
    """What the kernels expand, head by head, and again in the backward; any other expansion comes before them."""
    own, other = layer.q_expand, layer.k_expand
    if layer.subheads == 1 or own is None or other is None:
        return None
    readable = may_read(own, HeadwiseExpansion) and may_read(other, HeadwiseExpansion)
    return own if readable and isinstance(own, HeadwiseExpansion) else None


def read_and_write(
    layer: LinearAttentionMixer,
    projected: dict[str, Tensor],
    x: Tensor,
    state: LayerState | None,
    log_decay: Tensor | None,
    beta: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, LayerState]:
    """x ``[B, T, d]`` -> the sums over subheads ``[B, T, Hv, V]`` and the new state of `layer`.

    `projected` are the layer's products of x; `log_decay` and `beta` ``[B, T, Hv * E]``, zeros for padding, which
    `mask` bool ``[B, T]`` has at the end.
    """
    expand = _expansion(layer)
    how: dict[str, Any] = {"activation": expand and expand.activation, "grafted": bool(expand and expand.grafted)}
    heads = {name: projected[name] for name in "qkv"}
    for name in "qk" if layer.q_expand is not None and expand is None else "":
        other = getattr(layer, f"{name}_expand")
        heads[name] = other(heads[name].unflatten(-1, (layer.key_heads, -1)), x).flatten(-2)
    with torch.autocast(x.device.type, enabled=False):
        parts = {name: _heads(layer, name, y, state, expanded=expand is not None) for name, y in heads.items()}
        last = None if mask is None else newest(mask, TAPS - 1)
        crossing = context() is not None
        if crossing:
            parts = {name: _after_previous(part, last, how) for name, part in parts.items()}
        shape = (x.shape[0], beta.shape[2], layer.head_width, layer.value_width)
        before = None if state is None else prepare_state(state["recurrent"], shape, beta, torch.float32)
        if crossing:
            start = beta.new_zeros(shape, dtype=torch.float32) if before is None else before
            inputs = [x for part in parts.values() for x in (part.projected, part.weight, part.taps, part.state)]
            before = state_before(start, log_decay, beta, layer.output_weights(), *inputs)
        o, final = expanded_delta_rule(
            queries=parts["q"],
            keys=parts["k"],
            values=parts["v"],
            log_decay=log_decay,
            beta=beta,
            scale=layer.head_width**-0.5,
            state=before,
            weights=layer.output_weights(),
            **how,
        )
        o, final = state_after(o, final)
        if states_are_unread():
            # Those of the convolutions are expanded once more, by launches of their own.
            return o, {"recurrent": final}
        after = {f"{name}_conv": part.tail(**how, newest=last) for name, part in parts.items()}
    return o, {"recurrent": final, **after}


def _after_previous(part: Heads, last: Newest | None, how: dict[str, Any]) -> Heads:
    """`part` with the inputs of its convolution before this rank's piece. `last`: where its own last inputs lie."""
    if last is None:
        return replace(part, state=inputs_of_previous(part.tail(**how), part.state))
    part = replace(part, state=state_before(part.state, part.projected))
    projected, _ = state_after(part.projected, part.tail(**how, newest=last))
    return replace(part, projected=projected)


def _heads(layer: LinearAttentionMixer, name: str, y: Tensor, state: LayerState | None, expanded: bool) -> Heads:
    """The projection y ``[B, T, C]`` of q, k or v, and what the kernels need to make heads of it."""
    from longrecall.ops.convolution.triton.short import no_inputs
    from longrecall.ops.delta_rule.triton.expanded import Heads

    taps: Tensor = getattr(layer, f"{name}_conv").weight
    weight: Tensor | None = getattr(layer, f"{name}_expand").weight if expanded and name != "v" else None
    before = no_inputs(y, taps) if state is None else state[f"{name}_conv"].to(y.dtype)
    # Where the kernels expand, a state head is as wide as a projected one.
    width = layer.value_width if name == "v" else layer.head_width
    return Heads(y.unflatten(-1, (-1, width)), weight, taps, before)
