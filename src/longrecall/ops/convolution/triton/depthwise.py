"""Causal depthwise convolution of a few taps without an activation in one pass over memory, forward and backward.

A program takes a tile of tokens and channels and reads it once for every tap, each time one token further back. The
first of these reads comes from memory, the others from the cache. The gradients of the taps and of the bias are sums:
every program adds up its own, and torch adds up the programs. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, walkers, why_not_tensors

MOST_TAPS = 4
"""The most taps: their sums must fit in registers together with the tile. Plain torch takes more taps."""

SHORTEST_TEXT = 16
"""Tokens below which torch is as fast."""

ROWS, COLUMNS = 32, 64
"""Tokens and channels of a tile."""

PROGRAMS = 8
"""Programs of a backward launch for each multiprocessor: enough to keep memory busy, few partial sums."""


@triton.jit
def _tokens(x, rows, times, T, N, channel, C, ROW: tl.constexpr, shift):
    """The tile of tokens ``rows + shift`` of ``[N, ROW]``, 0 where that lies outside of its text of T tokens."""
    there = (rows < N) & (times + shift >= 0) & (times + shift < T)
    return tl.load(x + (rows + shift) * ROW + channel, mask=there & (channel < C), other=0.0).to(tl.float32)


@triton.jit
def _tap(weight, channel, C, back, W: tl.constexpr):
    """The taps ``[1, COLUMNS]`` of inputs `back` tokens ago, of weights ``[C, W]``."""
    return tl.load(weight + channel * W + (W - 1 - back), mask=channel < C, other=0.0).to(tl.float32)


@kernel
def depthwise_kernel(
    x, weight, bias, out, N, T, C, W: tl.constexpr, ROW: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile. `out` ``[N, C]`` for N tokens in texts of T."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    times = rows % T
    y = _tokens(x, rows, times, T, N, channel, C, ROW, 0) * _tap(weight, channel, C, 0, W)
    for back in tl.static_range(1, W):
        y += _tokens(x, rows, times, T, N, channel, C, ROW, -back) * _tap(weight, channel, C, back, W)
    if BIAS:
        y += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(out + rows * C + channel, y.to(out.dtype.element_ty), mask=(rows < N) & (channel < C))


@kernel
def depthwise_backward_kernel(
    x, weight, d_out, d_x, sums, N, T, C, W: tl.constexpr, ROW: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile. `sums` ``[programs, W + 1, C]``: of the taps, newest first, and of the bias."""
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    newest = tl.zeros([ROWS, COLUMNS], tl.float32)
    second, third, fourth, plain = newest, newest, newest, newest
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        times = rows % T
        d = _tokens(d_out, rows, times, T, N, channel, C, C, 0)
        to_x = d * _tap(weight, channel, C, 0, W)
        for ahead in tl.static_range(1, W):
            later = _tokens(d_out, rows, times, T, N, channel, C, C, ahead)
            to_x += later * _tap(weight, channel, C, ahead, W)
        tl.store(d_x + rows * C + channel, to_x.to(d_x.dtype.element_ty), mask=(rows < N) & (channel < C))
        newest += d * _tokens(x, rows, times, T, N, channel, C, ROW, 0)
        if W > 1:
            second += d * _tokens(x, rows, times, T, N, channel, C, ROW, -1)
        if W > 2:
            third += d * _tokens(x, rows, times, T, N, channel, C, ROW, -2)
        if W > 3:
            fourth += d * _tokens(x, rows, times, T, N, channel, C, ROW, -3)
        if BIAS:
            plain += d
    place = sums + tl.program_id(0) * (W + 1) * C + channel
    tl.store(place, tl.sum(newest, 0)[None, :], mask=channel < C)
    if W > 1:
        tl.store(place + C, tl.sum(second, 0)[None, :], mask=channel < C)
    if W > 2:
        tl.store(place + 2 * C, tl.sum(third, 0)[None, :], mask=channel < C)
    if W > 3:
        tl.store(place + 3 * C, tl.sum(fourth, 0)[None, :], mask=channel < C)
    if BIAS:
        tl.store(place + W * C, tl.sum(plain, 0)[None, :], mask=channel < C)


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot convolve x ``[B, T, C]`` with a weight ``[C, W]``, in words; None = they can."""
    if not 2 <= weight.shape[1] <= MOST_TAPS:
        return f"the kernels know convolutions of 2 to {MOST_TAPS} taps without activation, not of {weight.shape[1]}"
    if x.shape[1] < SHORTEST_TEXT:
        return f"fewer than {SHORTEST_TEXT} tokens are left to plain torch"
    return why_not_tensors(x, weight)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x ``[B, T, C]``, zeros before it, weight ``[C, W]`` with the newest input last, bias ``[C]`` -> ``[B, T, C]``.

    The taps and the bias add up in float32, which is rounded once, to the dtype of x. Gradients reach all three.
    """
    return cast(Tensor, _Convolve.apply(x, weight.contiguous(), bias if bias is None else bias.contiguous()))


def _constants(weight: Tensor, row: int, bias: bool) -> dict[str, Any]:
    return {"W": weight.shape[1], "ROW": row, "BIAS": bias, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}


class _Convolve(torch.autograd.Function):
    """x ``[B, T, C]``, whose tokens may be parts of wider rows, weight ``[C, W]``, bias ``[C]`` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batch, length, channels = x.shape
        if x.stride(2) != 1 or x.stride(0) != length * x.stride(1):
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        tokens, columns = batch * length, triton.cdiv(channels, COLUMNS)
        with on_device(x):
            depthwise_kernel[(triton.cdiv(tokens, ROWS), columns)](
                x, weight, weight if bias is None else bias, out, tokens, length, channels,
                **_constants(weight, x.stride(1), bias is not None),
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight, bias = ctx.saved_tensors
        batch, length, channels = x.shape
        width, tokens, columns = weight.shape[1], batch * length, triton.cdiv(channels, COLUMNS)
        count = walkers(x, triton.cdiv(tokens, ROWS), columns, PROGRAMS)
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        # There is always a row for the bias; without a bias it is not used.
        sums = torch.empty((count, width + 1, channels), device=x.device, dtype=torch.float32)
        with on_device(x):
            depthwise_backward_kernel[(count, columns)](
                x, weight, d_out.contiguous(), d_x, sums, tokens, length, channels,
                **_constants(weight, x.stride(1), bias is not None),
            )  # fmt: skip
        total = sums.sum(0)
        d_weight = total[:width].flip(0).t().to(weight.dtype)
        return d_x, d_weight, None if bias is None else total[width].to(bias.dtype)
