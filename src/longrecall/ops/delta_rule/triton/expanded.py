"""The delta rule after expansion and short convolutions. Its queries, keys and values are computed twice, not kept.

They are computed from the projected heads in one pass over memory. So the backward computes them again, a few rows of
the batch at a time. Expanded by E, queries and keys are E times as large as everything else that a layer keeps. As they
are not kept, memory hardly grows with E.

The forward expands in the same pass, and so does the backward on Hopper. Elsewhere the backward needs the inputs of the
convolutions in memory, and computes them by a product first. All ways round alike (`expansion.expand_and_convolve`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longrecall.ops.convolution.triton import short as convolution
from longrecall.ops.convolution.triton.short import laid_out
from longrecall.ops.delta_rule.triton import chunked as delta_rule
from longrecall.ops.delta_rule.widths import WIDTHS, built_width
from longrecall.ops.expansion.triton import expansion
from longrecall.ops.kernels.launch import on_device
from longrecall.ops.kernels.part_sums import added
from longrecall.ops.padding import Newest
from longrecall.ops.projections.triton.column_sums import column_sums

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """From what the queries, the keys or the values of a layer are computed."""

    projected: Tensor
    """``[B, T, H, D]``, before the activation."""
    weight: Tensor | None
    """The expansion, ``[H, D, F]``; grafted F = (E - 1) * D, else E * D. None = none, E = 1."""
    taps: Tensor
    """The convolution, ``[H * E * D, 4]``."""
    state: Tensor
    """The convolution's inputs before the first token, ``[B, H * E * D, 3]``, in the dtype of `projected`."""

    def tail(self, activation: Activation | None, grafted: bool, newest: Newest | None = None) -> Tensor:
        """The last three inputs of the convolution, ``[B, H * E * D, 3]``: its next state. At least 3 tokens.

        `newest`: where these inputs lie if there is padding at the end; None = there is no padding.
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
    state: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Expansion, convolution and SiLU of all three, the L2 norm of queries and keys, `delta_rule.subhead_delta_rule`.

    Gradients reach all tensors; `state` None = zeros. `activation` (before the expansion) and `grafted` describe the
    expansions, if there are any.
    """
    make = _Maker(activation, grafted)
    gates = delta_rule.complete(values.projected, log_decay, beta, weights, state)[1:]
    heads = [
        x
        for part in (queries, keys, values)
        for x in (part.projected.contiguous(), laid_out(part.state), part.weight, part.taps.contiguous())
    ]
    return cast(tuple[Tensor, Tensor], _ExpandedDeltaRule.apply(make, scale, *heads, *gates))


def why_not(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, **_: Any) -> str | None:
    """Why a layer's heads cannot go through convolution and delta rule without a copy, in words; None = they can."""
    for name, width in (("key", q.shape[3]), ("value", v.shape[3])):
        if not 1 <= width <= WIDTHS[-1] or built_width(width) != width:
            built = ", ".join(map(str, WIDTHS))
            return f"heads with a {name} width of {width} would have to be filled up; kernels are built for {built}"
    return delta_rule.why_not(q, k, v, log_decay, beta)


@dataclass(frozen=True)
class _Maker:
    """How projected heads become subheads."""

    activation: Activation | None
    grafted: bool

    def active(self, y: Tensor) -> Tensor:
        """The activated heads, which the expansion multiplies."""
        return cast(Activation, self.activation)(y)

    def inputs(self, first: Tensor, weight: Tensor | None, grafted: Tensor | None) -> Tensor:
        """The convolution's inputs ``[B, T, H * E, D]`` from activated heads, or projected ones without expansion."""
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
            return convolution.forward(y, taps, state, normalise=normalise)
        rest = (weight.to(y.dtype), y if self.grafted else None, taps, state)
        return expansion.expand_and_convolve(self.active(y), *rest, normalise=normalise)

    def through_activation(self, y: Tensor, d_active: Tensor, out: Tensor) -> None:
        """Write the gradient of y to `out`, given that of the activated heads; `out` may be the latter."""
        if self.activation is functional.silu:
            torch.ops.aten.silu_backward.grad_input(d_active, y, grad_input=out)
            return
        leaf = y.detach().requires_grad_()
        with torch.enable_grad():
            active = cast(Activation, self.activation)(leaf)
        out.copy_(torch.autograd.grad(active, leaf, d_active)[0])


HEADS = 12
"""Inputs of the autograd function for queries, keys and values: four for each."""


class _ExpandedDeltaRule(torch.autograd.Function):
    """Maker, scale; for each of q, k and v: projected, state, weight or None, taps; log decay, beta, weights, state.

    The last state may be None, zeros.
    """

    @staticmethod
    def forward(ctx: Any, make: _Maker, scale: float, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.make, ctx.scale = make, scale
        ctx.set_materialize_grads(False)
        with on_device(inputs[0]):
            made = [make.made(inputs[first : first + 4], normalise=first < 8) for first in range(0, HEADS, 4)]
            out, final, *solved = delta_rule.forward(scale, *made, *inputs[HEADS:])
        ctx.save_for_backward(*solved, *inputs)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inverse, cumulative, *inputs = ctx.saved_tensors
        with on_device(inverse):
            found = delta_rule.given(inputs[8], *grads)
            return (None, None, *_backward(ctx.make, ctx.scale, tuple(inputs), (inverse, cumulative), *found))


def _backward(
    make: _Maker,
    scale: float,
    inputs: tuple[Any, ...],
    solved: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_final: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of all inputs, in their order."""
    heads, (log_decay, beta, weights, state) = inputs[:HEADS], inputs[HEADS:]
    d_gates, d_weights = [torch.empty_like(log_decay), torch.empty_like(beta), delta_rule.room(state)], []
    step = _rows_at_a_time(heads, beta)
    groups = [slice(first, first + step) for first in range(0, len(beta), step)]
    queries, keys = (_Remade(make, heads[first : first + 4], groups, normalise=True) for first in (0, 4))
    # Values take little memory: they are computed once for all rows.
    values = _Remade(make, heads[8:], [slice(None)], normalise=False)
    v = values.make(slice(None))
    for rows in groups:
        q, k = queries.make(rows), keys.make(rows)
        gates = (log_decay[rows], beta[rows], weights, delta_rule.of_rows(state, rows))
        # The gradients of q, k and v are written over them: nothing reads them again.
        into = [q, k, v[rows], *(delta_rule.of_rows(x, rows) for x in d_gates)]
        found = (solved[0][rows], solved[1][rows])
        given = (found, d_out[rows], delta_rule.of_rows(d_final, rows), into)
        d_weights.append(delta_rule.group_backward(scale, (q, k, v[rows], *gates), *given))
        queries.backward(q)
        keys.backward(k)
    values.backward(v)
    d_heads = [x for part in (queries, keys, values) for x in part.gradients()]
    return [*d_heads, *d_gates[:2], added(d_weights), d_gates[2]]


class _Remade:
    """Queries, keys or values in the backward, which are computed again for one group of rows after the other."""

    def __init__(self, make: _Maker, heads: Sequence[Any], groups: list[slice], *, normalise: bool) -> None:
        self.maker, self.normalise, self.heads = make, normalise, list(heads)
        y, state, weight, taps = heads
        self.heads[1] = laid_out(state)
        self.d_y, self.d_before = torch.empty_like(y), y.new_empty((len(y), state.shape[2], len(taps)))
        if weight is not None:
            self.weight, self.active = weight.to(y.dtype).contiguous(), make.active(y)
            self.d_weights = self.weight.new_empty((len(groups), *weight.shape))
            self.for_weight = iter(self.d_weights)
        # Asked once for each group: memory for its gradients, its forward and its backward all depend on the answer.
        self.on_hopper = {rows.start: self.serves_on_hopper(rows) for rows in groups}
        counts = [self.parts(rows) for rows in groups]
        self.d_taps = y.new_empty((sum(counts), convolution.WIDTH, len(taps)), dtype=torch.float32)
        self.for_taps = iter(self.d_taps.split(counts))

    def parts(self, rows: slice) -> int:
        """How many parts of the taps' gradient the backward of some rows writes."""
        if self.heads[2] is None:
            return convolution.parts(self.heads[0][rows])
        return expansion.parts(self.active[rows], self.heads[3], self.on_hopper[rows.start])

    def serves_on_hopper(self, rows: slice) -> bool:
        """Whether the kernels in Gluon expand some rows."""
        if self.heads[2] is None:
            return False
        grafted = self.heads[0][rows] if self.maker.grafted else None
        return expansion.serves_on_hopper(self.active[rows], self.weight, grafted)

    def make(self, rows: slice) -> Tensor:
        """The queries, keys or values of these rows, as the forward computed them."""
        self.rows, (y, state, weight, taps) = rows, self.heads
        if weight is None:
            return convolution.forward(y[rows], taps, state[rows], normalise=self.normalise)
        grafted = y[rows] if self.maker.grafted else None
        self.made_of = (self.active[rows], self.weight, grafted, taps, state[rows])
        on_hopper = self.on_hopper[rows.start]
        made, self.kept = expansion.forward(*self.made_of, normalise=self.normalise, on_hopper=on_hopper)
        return made

    def backward(self, d_made: Tensor) -> None:
        """Store the gradients of the inputs of the last `make`, given that of its result."""
        y, state, d_y, d_before = (x[self.rows] for x in (*self.heads[:2], self.d_y, self.d_before))
        if self.heads[2] is None:
            rest = (self.heads[3], state, d_made, d_y, d_before, next(self.for_taps))
            convolution.backward(y, *rest, normalise=self.normalise)
            return
        into = (d_y, next(self.for_weight), next(self.for_taps))
        _, _, d_grafted, _ = expansion.backward(
            *self.made_of, self.kept, d_made, d_before, normalise=self.normalise, into=into
        )
        del self.made_of, self.kept
        self.maker.through_activation(y, d_y, d_y)
        if d_grafted is not None:
            d_y += d_grafted

    def gradients(self) -> list[Tensor | None]:
        """The gradients of projected heads, state, weight (None where there is none) and taps."""
        _, _, weight, taps = self.heads
        d_weight = None
        if weight is not None:
            # Each group's gradient was rounded when it was written; they are added up in float32.
            one = len(self.d_weights) == 1
            d_weight = self.d_weights[0].to(weight.dtype) if one else self.d_weights.sum(0, dtype=weight.dtype)
        d_taps = column_sums(self.d_taps.flatten(1)).unflatten(0, self.d_taps.shape[1:]).t()
        return [self.d_y, self.d_before.transpose(1, 2), d_weight, d_taps.to(taps.dtype)]


def _rows_at_a_time(heads: Sequence[Tensor], beta: Tensor) -> int:
    """Rows of the batch in a group."""
    (y, state), v = heads[:2], heads[8]
    shape = (*y.shape[:2], state.shape[1] // y.shape[3], y.shape[3])
    return delta_rule.rows_at_a_time(torch.empty(shape, device="meta"), v, beta)
