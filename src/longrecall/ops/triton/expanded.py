"""The delta rule behind expansion and short convolutions, whose queries, keys and values are made twice, not kept.

From the projected heads they come by one pass over memory (and, where they are expanded head by head, one product), so
the backward makes them again, a few rows of the batch at a time. Expanded by E, queries and keys are E times as large
as all else a layer holds on to: what it keeps, and its peak, hardly grow with E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.padding import Newest
from longrecall.ops.triton import delta_rule
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
            return make.wide(self.projected[:, -3:], self.weight).flatten(2).transpose(1, 2)
        last = self.projected.gather(1, newest.tokens[..., None, None].expand(-1, -1, *self.projected.shape[2:]))
        inputs = torch.cat([self.state.transpose(1, 2), make.wide(last, self.weight).flatten(2)], dim=1)
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

    def wide(self, y: Tensor, weight: Tensor | None) -> Tensor:
        """``[B, T, H, D]`` -> the convolution's inputs ``[B, T, H, E * D]``."""
        if weight is None or self.activation is None:
            return y
        grafted = y if self.grafted else None
        return cast(Tensor, _Expand.apply(self.activation(y), weight.to(y.dtype), grafted))

    def __call__(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """q, k ``[B, T, H * E, D]`` and v ``[B, T, Hv, V]`` from the projected heads, state, weight, taps of each."""
        made: list[Tensor] = []
        for first in range(0, len(heads), 4):
            y, state, weight, taps = heads[first : first + 4]
            z = self.wide(y, weight).unflatten(-1, (-1, y.shape[3])).flatten(2, 3)
            made.append(convolve_heads(z, taps, state, normalise=len(made) < 2))
        return made


class _Expand(torch.autograd.Function):
    """y ``[B, T, H, D]``, weight ``[H, D, F]``, head as y or None -> the head, if any, and y @ weight side by side.

    einsum would leave heads outermost in memory, and whoever reads a token's heads together would copy them; the head
    would be put in front by one more copy of all.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, head: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, weight)
        ctx.before = before = 0 if head is None else head.shape[3]
        out = y.new_empty((*y.shape[:3], before + weight.shape[2]))
        if head is not None:
            out[..., :before] = head
        torch.bmm(_by_head(y), weight, out=_by_head(out[..., before:]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weight = ctx.saved_tensors
        d_out, d_y = grads[0].contiguous(), torch.empty_like(y, memory_format=torch.contiguous_format)
        d_made = _by_head(d_out[..., ctx.before :])
        torch.bmm(d_made, weight.transpose(1, 2), out=_by_head(d_y))
        d_weight = torch.bmm(_by_head(y).transpose(1, 2), d_made)
        return d_y, d_weight, d_out[..., : ctx.before] if ctx.before else None


def _by_head(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` -> a view ``[H, B * T, D]``."""
    view: Tensor = x.flatten(0, 1).transpose(0, 1)
    return view


HEADS = 12
"""Inputs of the autograd function that queries, keys and values are made of, four each; two of them are per row."""


class _ExpandedDeltaRule(torch.autograd.Function):
    """Maker, scale; of q, of k and of v: projected, state, weight or None, taps; log decay, beta, weights, state."""

    @staticmethod
    def forward(ctx: Any, make: _Maker, scale: float, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.make, ctx.scale = make, scale
        with on_device(inputs[0]):
            out, final, *solved = delta_rule.forward(scale, *make(inputs[:HEADS]), *inputs[HEADS:])
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
    found: list[list[Tensor | None]] = [[] for _ in heads]
    step = _rows_at_a_time(heads, beta)
    for first in range(0, len(beta), step):
        rows = slice(first, first + step)
        pieces = [x if x is None else (x[rows] if _by_row(n) else x).detach() for n, x in enumerate(heads)]
        wanted = [x.requires_grad_() for x in pieces if x is not None]
        with torch.enable_grad():
            made = make(pieces)
        read = [x.detach() for x in made]
        # The gradients of q and k are written over them: nothing reads them again.
        d_read = [*read[:2], torch.empty_like(read[2])]
        gates = (log_decay[rows], beta[rows], weights, state[rows])
        into = [*d_read, *(x[rows] for x in d_gates)]
        d_weights += delta_rule.group_backward(
            scale, (*read, *gates), (solved[0][rows], solved[1][rows]), d_out[rows], d_final[rows], into
        )
        d_wanted = iter(torch.autograd.grad(made, wanted, d_read))
        for parts, x in zip(found, pieces, strict=True):
            parts.append(None if x is None else next(d_wanted))
    return [*(_merged(parts, _by_row(n)) for n, parts in enumerate(found)), *d_gates[:2], d_weights, d_gates[2]]


def _by_row(place: int) -> bool:
    """Whether one of the `HEADS` inputs (or its gradient) has the rows of the batch, or is shared by them."""
    return place % 4 < 2


def _merged(parts: list[Any], by_row: bool) -> Tensor | None:
    """The gradient of one input from those that groups of rows found; a single one is taken as it is."""
    if len(parts) == 1 or parts[0] is None:
        whole: Tensor | None = parts[0]
        return whole
    return torch.cat(parts) if by_row else torch.stack(parts).sum(0, dtype=torch.float32).to(parts[0].dtype)


def _rows_at_a_time(heads: Sequence[Tensor], beta: Tensor) -> int:
    """Rows of the batch that are made again together."""
    (y, state), v = heads[:2], heads[8]
    shape = (*y.shape[:2], state.shape[1] // y.shape[3], y.shape[3])
    return delta_rule.rows_at_a_time(torch.empty(shape, device="meta"), v, beta)
