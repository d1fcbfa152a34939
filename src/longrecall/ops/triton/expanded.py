"""The delta rule of head-wise expanded queries and keys, which are made twice rather than kept.

Expanded by E, queries and keys are E times as large as all else a layer holds on to for its backward pass. From the
projected heads they come by one product and one pass over memory, so the backward makes them again, a few rows of the
batch at a time: what a layer keeps, and its peak, hardly grow with E.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.triton import delta_rule
from longrecall.ops.triton.convolution import convolve_heads
from longrecall.ops.triton.launch import on_device


@dataclass(frozen=True)
class HeadwiseInputs:
    """What the queries (or the keys) of every subhead are made of."""

    projected: Tensor
    """``[B, T, H, D]``, before the activation."""
    weight: Tensor
    """The expansion, ``[H, D, F]``; grafted F = (E - 1) * D, else E * D."""
    taps: Tensor
    """The convolution, ``[H * E * D, 4]``."""
    state: Tensor
    """Its inputs before the first token, ``[B, H * E * D, 3]``."""


def expanded_delta_rule(
    queries: HeadwiseInputs,
    keys: HeadwiseInputs,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    activation: Callable[[Tensor], Tensor],
    grafted: bool,
    scale: float,
    state: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Expansion, convolution, SiLU and L2 norm of both, and `delta_rule.subhead_delta_rule`; all with gradients."""
    make = _Maker(activation, grafted)
    gates = delta_rule.complete(v, log_decay, beta, weights, state)
    both = (queries, keys)
    rows = [x.contiguous() for part in both for x in (part.projected, part.state)]
    shared = [x for part in both for x in (part.weight, part.taps)]
    return cast(tuple[Tensor, Tensor], _ExpandedDeltaRule.apply(make, scale, *rows, *shared, *gates))


def declines(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, **_: Any) -> str | None:
    """Why a layer's heads cannot go through convolution and delta rule without a copy, in words; None = they can."""
    for name, width in (("key", q.shape[3]), ("value", v.shape[3])):
        if not 1 <= width <= delta_rule.WIDTHS[-1] or delta_rule.built_width(width) != width:
            built = ", ".join(map(str, delta_rule.WIDTHS))
            return f"heads with a {name} width of {width} would have to be filled up; kernels are built for {built}"
    return delta_rule.declines(q, k, v, log_decay, beta)


def expand(y: Tensor, weight: Tensor) -> Tensor:
    """Each head times its matrix: y ``[B, T, H, D]``, weight ``[H, D, F]`` -> ``[B, T, H, F]``, contiguous."""
    return cast(Tensor, _Expand.apply(y, weight))


def tail(part: HeadwiseInputs, activation: Callable[[Tensor], Tensor], grafted: bool) -> Tensor:
    """The last three inputs of the convolution, ``[B, H * E * D, 3]``: its next state. At least 3 tokens."""
    last = _Maker(activation, grafted).wide(part.projected[:, -3:], part.weight)
    return last.flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class _Maker:
    """How projected heads become subheads."""

    activation: Callable[[Tensor], Tensor]
    grafted: bool

    def wide(self, y: Tensor, weight: Tensor) -> Tensor:
        """``[B, T, H, D]`` -> the convolution's inputs ``[B, T, H, E * D]``."""
        made = expand(self.activation(y), weight.to(y.dtype))
        return torch.cat([y, made], dim=-1) if self.grafted else made

    def __call__(self, y: Tensor, state: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
        z = self.wide(y, weight)
        return convolve_heads(z.unflatten(-1, (-1, y.shape[3])).flatten(2, 3), taps, state, normalise=True)


class _Expand(torch.autograd.Function):
    """einsum would leave heads outermost in memory, and whoever reads a token's heads together would copy them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        out = y.new_empty((*y.shape[:3], weight.shape[2]))
        torch.bmm(_by_head(y), weight, out=_by_head(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        y, weight = ctx.saved_tensors
        d_out, d_y = _by_head(grads[0].contiguous()), torch.empty_like(y, memory_format=torch.contiguous_format)
        torch.bmm(d_out, weight.transpose(1, 2), out=_by_head(d_y))
        return d_y, torch.bmm(_by_head(y).transpose(1, 2), d_out)


def _by_head(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` -> a view ``[H, B * T, D]``."""
    view: Tensor = x.flatten(0, 1).transpose(0, 1)
    return view


class _ExpandedDeltaRule(torch.autograd.Function):
    """Maker, scale; projected q, its state, those of k; weight and taps of q, of k; v, decay, beta, weights, state."""

    @staticmethod
    def forward(ctx: Any, make: _Maker, scale: float, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.make, ctx.scale = make, scale
        ctx.save_for_backward(*inputs)
        yq, sq, yk, sk, wq, tq, wk, tk, *gates = inputs
        with on_device(yq):
            return delta_rule.forward(scale, make(yq, sq, wq, tq), make(yk, sk, wk, tk), *gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        with on_device(inputs[0]):
            return (None, None, *_backward(ctx.make, ctx.scale, inputs, *(x.contiguous() for x in grads)))


def _backward(make: _Maker, scale: float, inputs: tuple[Tensor, ...], d_out: Tensor, d_final: Tensor) -> list[Tensor]:
    """Gradients of all inputs, in their order."""
    by_row, shared, (v, log_decay, beta, weights, state) = inputs[:4], inputs[4:8], inputs[8:]
    d_by_row = [torch.empty_like(x) for x in by_row]
    d_shared = [torch.zeros_like(x, dtype=torch.float32) for x in shared]
    d_gates = [torch.empty_like(x) for x in (v, log_decay, beta, state)]
    d_weights = torch.zeros_like(weights)
    rows, length, _, width = by_row[0].shape
    made_shape = (rows, length, by_row[1].shape[1] // width, width)
    step = delta_rule.rows_at_a_time(torch.empty(made_shape, device="meta"), v, beta)
    for first in range(0, rows, step):
        group = slice(first, first + step)
        pieces = [x[group].detach().requires_grad_() for x in by_row]
        params = [x.detach().requires_grad_() for x in shared]
        with torch.enable_grad():
            q = make(pieces[0], pieces[1], params[0], params[1])
            k = make(pieces[2], pieces[3], params[2], params[3])
        made = (q.detach(), k.detach())
        d_made = [torch.empty_like(x) for x in made]
        into = [*d_made, *(x[group] for x in d_gates)]
        gates = (v[group], log_decay[group], beta[group], weights, state[group])
        d_weights += delta_rule.group_backward(scale, (*made, *gates), d_out[group], d_final[group], into)
        del made
        found = torch.autograd.grad((q, k), (*pieces, *params), d_made)
        for total, part in zip(d_by_row, found[:4], strict=True):
            total[group] = part
        for total, part in zip(d_shared, found[4:], strict=True):
            total += part
    narrowed = [total.to(x.dtype) for total, x in zip(d_shared, shared, strict=True)]
    return [*d_by_row, *narrowed, *d_gates[:3], d_weights, d_gates[3]]
