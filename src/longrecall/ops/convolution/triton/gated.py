"""Hyena's convolutions of three taps on both gates and the value, and the product of the first gate and the value.

It is one pass over memory: the middle part and the product of the others are written. Only the inputs are kept for the
backward pass, which convolves again. The gradients of taps and biases are sums over tokens: each program adds up its
own, and torch adds up the programs. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, walkers, why_not_tensors

WIDTH = 3
"""Number of taps."""

SHORTEST_TEXT = 16
"""Tokens below which torch is as fast."""

ROWS, COLUMNS = 8, 64
"""Tokens and channels of a tile; with more of them the sums of the backward pass do not fit in registers."""

PROGRAMS = 8
"""Programs of a backward launch for each multiprocessor: enough to keep memory busy, few partial sums."""


@triton.jit
def _tokens(x, rows, times, T, N, channel, C, ROW, shift):
    """The tile of tokens ``rows + shift`` of ``[N, ROW]``, 0 where that lies outside of its text of T tokens."""
    there = (rows < N) & (times + shift >= 0) & (times + shift < T)
    return tl.load(x + (rows + shift) * ROW + channel, mask=there & (channel < C), other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, bias, channel, C):
    """Taps of the newest input and the two before it, and the bias, of weights ``[C, 3]``."""
    place, inside = weight + channel * 3, channel < C
    newest = tl.load(place + 2, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(place + 1, mask=inside, other=0.0).to(tl.float32)
    oldest = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return newest, before, oldest, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _convolved(taps, now, before, oldest):
    return taps[0] * now + taps[1] * before + taps[2] * oldest + taps[3]


@triton.jit
def _part(z, weight, bias, rows, times, T, N, channel, C):
    """The convolution of one part; z, weight and bias point to its first channel."""
    taps = _taps(weight, bias, channel, C)
    now = _tokens(z, rows, times, T, N, channel, C, 3 * C, 0)
    before = _tokens(z, rows, times, T, N, channel, C, 3 * C, -1)
    return _convolved(taps, now, before, _tokens(z, rows, times, T, N, channel, C, 3 * C, -2))


@kernel
def gated_convolution_kernel(
    z, weight, bias, passed, product, N, T, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One tile of all three parts of z ``[N, 3 C]``; `passed` and `product` ``[N, C]``."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    times = rows % T
    inside, place = (rows < N) & (channel < C), rows * C + channel
    kept = _part(z + C, weight + 3 * C, bias + C, rows, times, T, N, channel, C)
    tl.store(passed + place, kept.to(passed.dtype.element_ty), mask=inside)
    y = _part(z, weight, bias, rows, times, T, N, channel, C)
    y *= _part(z + 2 * C, weight + 6 * C, bias + 2 * C, rows, times, T, N, channel, C)
    tl.store(product + place, y.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _to_inputs(taps, now, after, last):
    """The gradient of an input from those of the convolution at its token and the next two."""
    return taps[0] * now + taps[1] * after + taps[2] * last


@triton.jit
def _store_sums(sums, s0, s1, s2, plain, channel, C):
    """Sums over the tile of the gradients of three taps, newest first, and of the bias; rows of `sums` are 3 C wide."""
    tl.store(sums + channel, tl.sum(s0, 0)[None, :], mask=channel < C)
    tl.store(sums + 3 * C + channel, tl.sum(s1, 0)[None, :], mask=channel < C)
    tl.store(sums + 6 * C + channel, tl.sum(s2, 0)[None, :], mask=channel < C)
    tl.store(sums + 9 * C + channel, tl.sum(plain, 0)[None, :], mask=channel < C)


@kernel
def gated_convolution_backward_kernel(
    z, weight, bias, d_passed, d_product, d_z, sums, N, T, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Every `num_programs`-th tile; `sums` float32 ``[programs, 4, 3 C]``: of the taps, newest first, and the bias."""
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    left, middle = _taps(weight, bias, channel, C), _taps(weight + 3 * C, bias + C, channel, C)
    right = _taps(weight + 6 * C, bias + 2 * C, channel, C)
    a0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    a1, a2, a3, m0, m1, m2, m3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0, a0, a0, a0, a0
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        times = rows % T
        inside, place = (rows < N) & (channel < C), d_z + rows * 3 * C + channel
        d0 = _tokens(d_passed, rows, times, T, N, channel, C, C, 0)
        d1 = _tokens(d_passed, rows, times, T, N, channel, C, C, 1)
        d2 = _tokens(d_passed, rows, times, T, N, channel, C, C, 2)
        tl.store(place + C, _to_inputs(middle, d0, d1, d2).to(d_z.dtype.element_ty), mask=inside)
        m0 += d0 * _tokens(z + C, rows, times, T, N, channel, C, 3 * C, 0)
        m1 += d0 * _tokens(z + C, rows, times, T, N, channel, C, 3 * C, -1)
        m2 += d0 * _tokens(z + C, rows, times, T, N, channel, C, 3 * C, -2)
        m3 += d0
        p0 = _tokens(d_product, rows, times, T, N, channel, C, C, 0)
        p1 = _tokens(d_product, rows, times, T, N, channel, C, C, 1)
        p2 = _tokens(d_product, rows, times, T, N, channel, C, C, 2)
        x0 = _tokens(z, rows, times, T, N, channel, C, 3 * C, -2)
        x1 = _tokens(z, rows, times, T, N, channel, C, 3 * C, -1)
        x2 = _tokens(z, rows, times, T, N, channel, C, 3 * C, 0)
        x3 = _tokens(z, rows, times, T, N, channel, C, 3 * C, 1)
        x4 = _tokens(z, rows, times, T, N, channel, C, 3 * C, 2)
        y0 = _tokens(z + 2 * C, rows, times, T, N, channel, C, 3 * C, -2)
        y1 = _tokens(z + 2 * C, rows, times, T, N, channel, C, 3 * C, -1)
        y2 = _tokens(z + 2 * C, rows, times, T, N, channel, C, 3 * C, 0)
        y3 = _tokens(z + 2 * C, rows, times, T, N, channel, C, 3 * C, 1)
        y4 = _tokens(z + 2 * C, rows, times, T, N, channel, C, 3 * C, 2)
        # The gradient of a factor is the other factor, convolved, times the gradient of the product.
        e0, f0 = p0 * _convolved(right, y2, y1, y0), p0 * _convolved(left, x2, x1, x0)
        e1, f1 = p1 * _convolved(right, y3, y2, y1), p1 * _convolved(left, x3, x2, x1)
        e2, f2 = p2 * _convolved(right, y4, y3, y2), p2 * _convolved(left, x4, x3, x2)
        tl.store(place, _to_inputs(left, e0, e1, e2).to(d_z.dtype.element_ty), mask=inside)
        tl.store(place + 2 * C, _to_inputs(right, f0, f1, f2).to(d_z.dtype.element_ty), mask=inside)
        a0 += e0 * x2
        a1 += e0 * x1
        a2 += e0 * x0
        a3 += e0
        b0 += f0 * y2
        b1 += f0 * y1
        b2 += f0 * y0
        b3 += f0
    sums += tl.program_id(0) * 12 * C
    _store_sums(sums, a0, a1, a2, a3, channel, C)
    _store_sums(sums + C, m0, m1, m2, m3, channel, C)
    _store_sums(sums + 2 * C, b0, b1, b2, b3, channel, C)


def why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the kernels cannot convolve x ``[B, T, 3 C]`` with a weight ``[3 C, W]``, in words; None = they can."""
    if weight.shape[1] != WIDTH or bias is None:
        return f"the kernels know gated convolutions of {WIDTH} taps with a bias"
    if x.shape[1] < SHORTEST_TEXT:
        return f"fewer than {SHORTEST_TEXT} tokens are left to plain torch"
    return why_not_tensors(x, weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[B, T, 3 C]``, zeros before it, weight ``[3 C, 3]``, bias ``[3 C]`` -> middle part, product of the others."""
    return cast(tuple[Tensor, Tensor], _Convolve.apply(x.contiguous(), weight.contiguous(), bias.contiguous()))


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, bias)
        batch, length, channels = x.shape[0], x.shape[1], x.shape[2] // 3
        passed, product = (x.new_empty((batch, length, channels)) for _ in range(2))
        tokens = batch * length
        with on_device(x):
            gated_convolution_kernel[(triton.cdiv(tokens, ROWS), triton.cdiv(channels, COLUMNS))](
                x, weight, bias, passed, product, tokens, length, channels, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
            )
        return passed, product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_passed: Tensor, d_product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        batch, length, channels = x.shape[0], x.shape[1], x.shape[2] // 3
        tokens, columns = batch * length, triton.cdiv(channels, COLUMNS)
        count = walkers(x, triton.cdiv(tokens, ROWS), columns, PROGRAMS)
        d_x = torch.empty_like(x)
        sums = torch.empty((count, 4, 3 * channels), device=x.device, dtype=torch.float32)
        with on_device(x):
            gated_convolution_backward_kernel[(count, columns)](
                x, weight, bias, d_passed.contiguous(), d_product.contiguous(), d_x, sums, tokens, length, channels,
                ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
        total = sums.sum(0)
        return d_x, total[:WIDTH].flip(0).t().to(weight.dtype), total[WIDTH].to(bias.dtype)
