"""The delta rule behind expansion and short convolutions, whose queries, keys and values are made twice, not kept.

From the projected heads they come by one pass over memory, so the backward makes them again, a few rows of the batch at
a time. Expanded by E, queries and keys are E times as large as all else a layer holds on to: what it keeps, and its
peak, hardly grow with E. The forward expands in the same pass; the backward, which needs what the convolutions read, by
a product before it. Both round alike (`expansion.expand_and_convolve`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longrecall.ops.padding import Newest
from longrecall.ops.triton import delta_rule, expansion
from longrecall.ops.triton.convolution import convolve_heads
from longrecall.ops.triton.launch import on_device

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """What the queries, the keys or the values of a layer are made of."""

    projected: Tensor
    """``[B, T, H, D]``, before the activation."""
    weight: Tensor | None
    """The expansion, ``[H, D, F]``; grafted F = (E - 1) * D, else E * D. None = none, E = 1."""
    taps: Tensor
    """The convolution, ``[H * E * D, 4]``."""
    state: Tensor
    """Its inputs before the first token, ``[B, H * E * D, 3]``."""

    def tail(self, activation: Activation | None, grafted: bool, newest: Newest | None = None) -> Tensor:
        """The last three inputs of the convolution, ``[B, H * E * D, 3]``: its next state. At least 3 tokens.

        `newest`: where they lie when padding comes last; None = there is none.
        """
        make = _Maker(activation, grafted)
        if newest is None:
            return make.tail(self.projected[:, -3:], self.weight).transpose(1, 2)
        last = self.projected.gather(1, newest.tokens[..., None, None].expand(-1, -1, *self.projected.shape[2:]))
        inputs = torch.cat([self.state.transpose(1, 2), make.tail(last, self.weight)], dim=1)
        return inputs.gather(1, newest.inputs[..., None].expand(-1, -1, inputs.shape[2])).transpose(1, 2)


def expanded_delta_rule(
    queries: Heads,
    keys: Heads,
    values: Heads,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    activation: Activation | None,
    grafted: bool,
    scale: float,
    state: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Expansion, convolution and SiLU of all three, the L2 norm of queries and keys, `delta_rule.subhead_delta_rule`.

    Gradients reach all tensors. `activation` (before the expansion) and `grafted` are those of the expansions, if any.
    """
    make = _Maker(activation, grafted)
    gates = delta_rule.complete(values.projected, log_decay, beta, weights, state)[1:]
    heads = [
        x
        for part in (queries, keys, values)
        for x in (part.projected.contiguous(), part.state.contiguous(), part.weight, part.taps)
    ]
    return cast(tuple[Tensor, Tensor], _ExpandedDeltaRule.apply(make, scale, *heads, *gates))


def declines(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, **_: Any) -> str | None:
    """Why a layer's heads cannot go through convolution and delta rule without a copy, in words; None = they can."""
    for name, width in (("key", q.shape[3]), ("value", v.shape[3])):
        if not 1 <= width <= delta_rule.WIDTHS[-1] or delta_rule.built_width(width) != width:
            built = ", ".join(map(str, delta_rule.WIDTHS))
            return f"heads with a {name} width of {width} would have to be filled up; kernels are built for {built}"
    return delta_rule.declines(q, k, v, log_decay, beta)


@dataclass(frozen=True)
class _Maker:
    """How projected heads become subheads."""

    activation: Activation | None
    grafted: bool

    def active(self, y: Tensor) -> Tensor:
        """What the expansion multiplies."""
        return cast(Activation, self.activation)(y)

    def inputs(self, first: Tensor, weight: Tensor | None, grafted: Tensor | None) -> Tensor:
        """The convolution's inputs ``[B, T, H * E, D]`` from `active`, or from projected heads without an expansion."""
        return first if weight is None else expansion.expand(first, weight.to(first.dtype), grafted)

    def tail(self, y: Tensor, weight: Tensor | None) -> Tensor:
        """The convolution's inputs of some tokens, ``[B, T, H * E * D]``."""
        if weight is None:
            return y.flatten(2)
        return self.inputs(self.active(y), weight, y if self.grafted else None).flatten(2)

    def made(self, heads: Sequence[Any], *, normalise: bool) -> Tensor:
        """q or k ``[B, T, H * E, D]``, or v, from projected heads, state, weight and taps; without a gradient."""
        y, state, weight, taps = heads
        if weight is None:
            return convolve_heads(y, taps, state, normalise=normalise)
        rest = (weight.to(y.dtype), y if self.grafted else None, taps, state)
        return expansion.expand_and_convolve(self.active(y), *rest, normalise=normalise)

    def differentiable(self, pieces: Sequence[Any], grafted: Tensor | None, *, normalise: bool) -> Tensor:
        """As `made`, with gradients, from `active` or projected heads, state, weight and taps."""
        first, state, weight, taps = pieces
        if weight is None:
            return convolve_heads(first, taps, state, normalise=normalise)
        rest = (weight.to(first.dtype), grafted, taps, state)
        return expansion.convolve_expanded(first, *rest, normalise=normalise)

    def through_activation(self, y: Tensor, d_active: Tensor, out: Tensor) -> None:
        """Write the gradient of y to `out`, given that of the activated heads."""
        if self.activation is functional.silu:
            torch.ops.aten.silu_backward.grad_input(d_active, y, grad_input=out)
            return
        leaf = y.detach().requires_grad_()
        with torch.enable_grad():
            active = cast(Activation, self.activation)(leaf)
        out.copy_(torch.autograd.grad(active, leaf, d_active)[0])


HEADS = 12
"""Inputs of the autograd function that queries, keys and values are made of, four each."""


class _ExpandedDeltaRule(torch.autograd.Function):
    """Maker, scale; of q, of k and of v: projected, state, weight or None, taps; log decay, beta, weights, state."""

    @staticmethod
    def forward(ctx: Any, make: _Maker, scale: float, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.make, ctx.scale = make, scale
        with on_device(inputs[0]):
            made = [make.made(inputs[first : first + 4], normalise=first < 8) for first in range(0, HEADS, 4)]
            out, final, *solved = delta_rule.forward(scale, *made, *inputs[HEADS:])
        ctx.save_for_backward(*solved, *inputs)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inverse, cumulative, *inputs = ctx.saved_tensors
        with on_device(inverse):
            solved, found = (inverse, cumulative), (x.contiguous() for x in grads)
            return (None, None, *_backward(ctx.make, ctx.scale, tuple(inputs), solved, *found))


def _backward(
    make: _Maker,
    scale: float,
    inputs: tuple[Tensor, ...],
    solved: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_final: Tensor,
) -> list[Tensor | None]:
    """Gradients of all inputs, in their order."""
    heads, (log_decay, beta, weights, state) = inputs[:HEADS], inputs[HEADS:]
    d_gates, d_weights = [torch.empty_like(x) for x in (log_decay, beta, state)], torch.zeros_like(weights)
    queries, keys, values = (_Remade(make, heads[first : first + 4], normalise=first < 8) for first in (0, 4, 8))
    # Values are few: made once for all rows.
    v = values.make(slice(None))
    step = _rows_at_a_time(heads, beta)
    for first in range(0, len(beta), step):
        rows = slice(first, first + step)
        q, k = queries.make(rows), keys.make(rows)
        gates = (log_decay[rows], beta[rows], weights, state[rows])
        # The gradients of q, k and v are written over them: nothing reads them again.
        into = [q, k, v[rows], *(x[rows] for x in d_gates)]
        found = (solved[0][rows], solved[1][rows])
        d_weights += delta_rule.group_backward(scale, (q, k, v[rows], *gates), found, d_out[rows], d_final[rows], into)
        queries.backward(q)
        keys.backward(k)
    values.backward(v)
    d_heads = [x for part in (queries, keys, values) for x in part.gradients()]
    return [*d_heads, *d_gates[:2], d_weights, d_gates[2]]


class _Remade:
    """Queries, keys or values in the backward: made again for some rows of the batch after the other."""

    def __init__(self, make: _Maker, heads: Sequence[Tensor], *, normalise: bool) -> None:
        self.maker, self.normalise = make, normalise
        self.heads = [x if x is None else x.detach() for x in heads]
        self.rows: list[slice] = []
        self.found: list[tuple[Tensor, ...]] = []
        """Gradients of these rows: projected heads, or what their expansion multiplies; state, weight, if any, taps."""
        self.d_grafted: list[Tensor] = []
        """Those of projected heads as the first subheads."""

    def make(self, rows: slice) -> Tensor:
        """What the layer's forward made of these rows, without a gradient."""
        y, state, weight, taps = self.heads
        first = y[rows] if weight is None else self.maker.active(y[rows])
        grafted = [y[rows]] if weight is not None and self.maker.grafted else []
        pieces = [x if x is None else x.detach().requires_grad_() for x in (first, state[rows], weight, taps, *grafted)]
        with torch.enable_grad():
            self.made = self.maker.differentiable(pieces[:4], pieces[4] if grafted else None, normalise=self.normalise)
        self.leaves = [x for x in pieces if x is not None]
        self.rows.append(rows)
        return self.made.detach()

    def backward(self, d_made: Tensor) -> None:
        """Keep the gradients of what `make` was made of, given its own."""
        found = torch.autograd.grad(self.made, self.leaves, d_made)
        del self.made, self.leaves
        if self.heads[2] is not None and self.maker.grafted:
            # Without a copy the gradients of all subheads, of which it is a part, would be kept.
            self.d_grafted.append(found[-1].clone())
            found = found[:-1]
        self.found.append(found)

    def gradients(self) -> list[Tensor | None]:
        """Those of projected heads, state, weight (None where there is none) and taps."""
        d_first, d_state, *shared = (list(x) for x in zip(*self.found, strict=True))
        if self.heads[2] is None:
            return [_joined(d_first), _joined(d_state), None, *map(_summed, shared)]
        y = self.heads[0]
        d_y = torch.empty_like(y)
        for rows, d_active in zip(self.rows, d_first, strict=True):
            self.maker.through_activation(y[rows], d_active, d_y[rows])
        for rows, d_head in zip(self.rows, self.d_grafted, strict=self.maker.grafted):
            d_y[rows] += d_head
        return [d_y, _joined(d_state), *map(_summed, shared)]


def _joined(parts: list[Tensor]) -> Tensor:
    """The gradient of one input from those of groups of rows; a single one is taken as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _summed(parts: list[Tensor]) -> Tensor:
    """The gradient of an input that all rows share."""
    if len(parts) <= 2:
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return torch.stack(parts).sum(0, dtype=torch.float32).to(parts[0].dtype)


def _rows_at_a_time(heads: Sequence[Tensor], beta: Tensor) -> int:
    """Rows of the batch that are made again together."""
    (y, state), v = heads[:2], heads[8]
    shape = (*y.shape[:2], state.shape[1] // y.shape[3], y.shape[3])
    return delta_rule.rows_at_a_time(torch.empty(shape, device="meta"), v, beta)
