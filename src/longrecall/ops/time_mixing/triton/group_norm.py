"""Norms of heads times a gate in one pass over memory, forward and backward.

A norm subtracts the mean of a head and divides by its standard deviation.

The gradients of weight and bias are sums over tokens: every program adds up its own, and torch adds up the
programs. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors
from longrecall.ops.norms.triton.rms_norm import WIDEST, programs, sizes


@triton.jit
def _normed(x, place, columns, inside, eps, WIDTH: tl.constexpr):
    """Rows minus their mean, divided by their standard deviation; and 1 / standard deviation ``[rows, 1]``."""
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(columns < WIDTH, wide - (tl.sum(wide, 1) / WIDTH)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)[:, None]
    return centred * inverse, inverse


@triton.jit
def _gate(gate, place, inside):
    """The gate and its sigmoid."""
    wide = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    return wide, tl.sigmoid(wide)


@kernel
def group_norm_kernel(
    x, gate, weight, bias, out, N, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one head."""
    head = tl.program_id(1)
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < N) & (columns < WIDTH)
    place = (rows * HEADS + head) * WIDTH + columns
    normed, _inverse = _normed(x, place, columns, inside, eps, WIDTH)
    scale = tl.load(weight + head * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    offset = tl.load(bias + head * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    raw, share = _gate(gate, place, inside)
    tl.store(out + place, ((normed * scale + offset) * raw * share).to(out.dtype.element_ty), mask=inside)


@kernel
def group_norm_backward_kernel(
    x, gate, weight, bias, d_out, d_x, d_gate, sums, N, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile of one head; `sums` float32 ``[programs, 2, HEADS * WIDTH]``: weight, bias."""
    first, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + head * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    offset = tl.load(bias + head * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    to_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    to_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(first, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        inside = (rows < N) & (columns < WIDTH)
        place = (rows * HEADS + head) * WIDTH + columns
        normed, inverse = _normed(x, place, columns, inside, eps, WIDTH)
        raw, share = _gate(gate, place, inside)
        d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        to_gate = d * (normed * scale + offset) * share * (1.0 + raw * (1.0 - share))
        tl.store(d_gate + place, to_gate.to(d_gate.dtype.element_ty), mask=inside)
        d *= raw * share
        to_weight += d * normed
        to_bias += d
        d *= scale
        d = inverse * (d - (tl.sum(d, 1) / WIDTH)[:, None] - normed * (tl.sum(d * normed, 1) / WIDTH)[:, None])
        tl.store(d_x + place, d.to(d_x.dtype.element_ty), mask=inside)
    place = sums + (first * 2 * HEADS + head) * WIDTH + columns
    tl.store(place, tl.sum(to_weight, 0)[None, :], mask=columns < WIDTH)
    tl.store(place + HEADS * WIDTH, tl.sum(to_bias, 0)[None, :], mask=columns < WIDTH)


def why_not(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Why the kernels cannot norm heads x ``[B, T, H, V]``, in words; None = they can."""
    if x.shape[-1] > WIDEST:
        return f"heads of {x.shape[-1]} channels are too wide; the kernels hold up to {WIDEST}"
    return why_not_tensors(x, gate, weight, bias)


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`ops.time_mixing.op.gated_group_norm`."""
    return cast(Tensor, _GatedGroupNorm.apply(eps, dtype, *(y.contiguous() for y in (x, gate, weight, bias))))


class _GatedGroupNorm(torch.autograd.Function):
    """Eps, dtype; x ``[B, T, H, V]``, gate ``[B, T, H * V]``, weight and bias ``[H * V]`` -> as the gate, in dtype."""

    @staticmethod
    def forward(ctx: Any, eps: float, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        x, gate, weight, bias = inputs
        ctx.eps = eps
        ctx.save_for_backward(*inputs)
        heads, width = x.shape[2:]
        tile, tokens = sizes(width), x.shape[0] * x.shape[1]
        out = torch.empty_like(gate, dtype=dtype)
        with on_device(x):
            group_norm_kernel[(triton.cdiv(tokens, tile["ROWS"]), heads)](
                x, gate, weight, bias, out, tokens, eps, HEADS=heads, WIDTH=width, **tile
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, bias = ctx.saved_tensors
        heads, width = x.shape[2:]
        tile, tokens = sizes(width), x.shape[0] * x.shape[1]
        count = max(1, programs(x, tokens, tile["ROWS"]) // heads)
        d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
        sums = torch.empty((count, 2, heads * width), device=x.device, dtype=torch.float32)
        with on_device(x):
            group_norm_backward_kernel[(count, heads)](
                x, gate, weight, bias, d_out.contiguous(), d_x, d_gate, sums, tokens, ctx.eps,
                HEADS=heads, WIDTH=width, **tile,
            )  # fmt: skip
        d_weight, d_bias = sums.sum(0)
        return None, None, d_x, d_gate, d_weight.to(weight.dtype), d_bias.to(bias.dtype)
