"""The delta-rule layers on the kernels: everything between the projections, without repeated or expanded copies.

The plain path (layers/mixers/delta_net.py) is the definition; this one gives its numbers, rounded once more where
queries and keys stay in the model's dtype after their norm.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longrecall.layers.expansion import HeadwiseExpansion
from longrecall.layers.mixers.base import LayerState
from longrecall.ops.dispatch import SHORTEST_TRITON
from longrecall.ops.shapes import prepare_state
from longrecall.ops.triton import backend as triton

if TYPE_CHECKING:
    from longrecall.layers.mixers.delta_net import DeltaNet

TAPS = 4
"""Width of the short convolutions that the kernels know."""


def declines(layer: DeltaNet, x: Tensor, mask: Tensor | None, log_decay: Tensor | None) -> str | None:
    """Why the kernels cannot serve this call of a layer, in words; None = they can."""
    wanted = os.environ.get("LONGRECALL_BACKEND") or None
    if wanted not in (None, "triton"):
        return f"LONGRECALL_BACKEND is {wanted}"
    if wanted is None and not x.is_cuda:
        return "the tensors are not on a GPU"
    if mask is not None:
        return "padded tokens are left to the plain path"
    if x.shape[1] < SHORTEST_TRITON:
        return f"sequences of fewer than {SHORTEST_TRITON} tokens are left to the plain path"
    for convolution in (layer.q_conv, layer.k_conv, layer.v_conv):
        if convolution is None or convolution.weight.shape[1] != TAPS or convolution.bias is not None:
            return f"the short convolutions must have {TAPS} taps and no bias"
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    like = {name: x.new_empty((1, 1, 1, width), dtype=dtype) for name, width in _widths(layer).items()}
    like["beta"] = x.new_empty((x.shape[0], 1, layer.config.state_heads), dtype=torch.float32)
    return triton.declines("expanded_delta_rule", {**like, "log_decay": log_decay})


def _widths(layer: DeltaNet) -> dict[str, int]:
    return {"q": layer.head_width, "k": layer.head_width, "v": layer.value_width}


def read_and_write(
    layer: DeltaNet, x: Tensor, state: LayerState | None, log_decay: Tensor | None, beta: Tensor
) -> tuple[Tensor, LayerState]:
    """x ``[B, T, d]`` -> the sums over subheads ``[B, T, Hv, V]`` and the new state of `layer`.

    `log_decay` and `beta` ``[B, T, Hv * E]``. The projections are the layer's own.
    """
    heads = {name: getattr(layer, f"{name}_proj")(x) for name in "qkv"}
    again = isinstance(layer.q_expand, HeadwiseExpansion) and layer.subheads > 1
    for name in "" if again else "qk":
        expand = getattr(layer, f"{name}_expand")
        if expand is not None:
            heads[name] = expand(heads[name].unflatten(-1, (layer.key_heads, -1)), x).flatten(-2)
    with torch.autocast(x.device.type, enabled=False):
        v, after = _convolved(layer, "v", heads["v"], state)
        shape = (x.shape[0], beta.shape[2], layer.head_width, layer.value_width)
        rest = {
            "v": v,
            "log_decay": log_decay,
            "beta": beta,
            "scale": layer.head_width**-0.5,
            "state": prepare_state(None if state is None else state["recurrent"], shape, v, torch.float32),
            "weights": layer.output_weights(),
        }
        if again:
            o, final, more = _expanded(layer, heads, state, rest)
        else:
            (q, of_q), (k, of_k) = (_convolved(layer, name, heads[name], state) for name in "qk")
            o, final = triton.subhead_delta_rule(q=q, k=k, **rest)
            more = {**of_q, **of_k}
    return o, {"recurrent": final, **after, **more}


def _convolved(layer: DeltaNet, name: str, y: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
    """y ``[B, T, C]`` convolved and, but for values, normalised -> ``[B, T, heads, width]``, and its state."""
    z = y.unflatten(-1, (-1, layer.value_width if name == "v" else layer.head_width))
    taps, before = _convolution(layer, name, y, state)
    out = triton.convolve_heads(z, taps, before, normalise=name != "v")
    return out, {f"{name}_conv": y[:, 1 - TAPS :].transpose(1, 2)}


def _convolution(layer: DeltaNet, name: str, like: Tensor, state: LayerState | None) -> tuple[Tensor, Tensor]:
    """The taps ``[C, W]`` and the inputs before the first token ``[B, C, W - 1]``, zeros without a state."""
    taps: Tensor = getattr(layer, f"{name}_conv").weight
    if state is None:
        return taps, like.new_zeros((like.shape[0], taps.shape[0], TAPS - 1))
    return taps, state[f"{name}_conv"].to(like.dtype)


def _expanded(
    layer: DeltaNet, heads: dict[str, Tensor], state: LayerState | None, rest: dict[str, Any]
) -> tuple[Tensor, Tensor, LayerState]:
    """The same for queries and keys that are made again in the backward pass (ops/triton/expanded.py)."""
    from longrecall.ops.triton import expanded

    expand = layer.q_expand
    assert isinstance(expand, HeadwiseExpansion)
    how: dict[str, Any] = {"activation": expand.activation, "grafted": expand.grafted}
    parts, after = [], {}
    for name in "qk":
        y = heads[name]
        taps, before = _convolution(layer, name, y, state)
        weight: Tensor = getattr(layer, f"{name}_expand").weight
        part = expanded.HeadwiseInputs(y.unflatten(-1, (layer.key_heads, -1)), weight, taps, before)
        after[f"{name}_conv"] = expanded.tail(part, **how)
        parts.append(part)
    o, final = triton.expanded_delta_rule(queries=parts[0], keys=parts[1], **how, **rest)
    return o, final, after
