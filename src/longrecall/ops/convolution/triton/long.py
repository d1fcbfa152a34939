r"""Causal convolutions of long filters as products with Toeplitz matrices on the matrix units, forward and backward.

For one channel the outputs of all rows of a batch are :math:`Y = X M`, with :math:`M_{st} = h_{t-s}` for s <= t. The
work grows with the square of the length, which that of a Fourier transform does not. But the transform has twice the
length, so that nothing wraps around, and moves every number through memory many times. The matrix units are so much
faster than memory that the products win up to `LONGEST` tokens. M is never stored: a tile of it is gathered from the
taps. The gradient of a tap is the sum of a diagonal of :math:`X^\top D`, where D is the gradient of Y.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import arithmetic, block, kernel, on_device, product, why_not_tensors

TILE = tl.constexpr(64)
"""Tokens of a tile of the Toeplitz matrix."""

MOST_ROWS = 128
"""Rows of a batch that are multiplied by a tile at a time."""

SHORTEST, LONGEST = 16, 512
"""Lengths that the kernels serve."""

FEWEST_ROWS = 16
"""With fewer rows of a batch the products would be mostly padding."""


@kernel
def transpose_kernel(x, out, P, Q, x_batch, x_row, SIDE: tl.constexpr):
    """``[B, P, Q]`` with the given strides -> ``[B, Q, P]`` in the dtype of `out`."""
    b = tl.program_id(0).to(tl.int64)
    p, q = tl.program_id(1) * SIDE + tl.arange(0, SIDE), tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    inside = (p < P)[:, None] & (q < Q)[None, :]
    tile = tl.load(x + b * x_batch + p[:, None] * x_row + q[None, :], mask=inside, other=0.0)
    place = out + b * P * Q + q[:, None].to(tl.int64) * P + p[None, :]
    tl.store(place, tl.trans(tile).to(out.dtype.element_ty), mask=(q < Q)[:, None] & (p < P)[None, :])


@triton.jit
def _rows(x, first, steps, B, C, LENGTH, c, BLOCK: tl.constexpr):
    """Tile ``[BLOCK, TILE]`` of one channel of ``[B, C, LENGTH]``: rows from `first` on, the given steps."""
    b = (first + tl.arange(0, BLOCK))[:, None]
    place = x + (b.to(tl.int64) * C + c) * LENGTH + steps[None, :]
    return tl.load(place, mask=(b < B) & (steps < LENGTH)[None, :], other=0.0)


@kernel
def toeplitz_kernel(
    x, taps, out, B, C, LENGTH, LAGS, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the outputs ``[B, C, LENGTH]`` of a channel; BACKWARD: of its inputs' gradients, from the outputs'."""
    c, block_of_steps, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK
    steps = block_of_steps * TILE + tl.arange(0, TILE)
    total = tl.zeros([BLOCK, TILE], tl.float32)
    low, high = 0, block_of_steps + 1
    if BACKWARD:
        low, high = block_of_steps, tl.cdiv(LENGTH, TILE)
    for other in range(low, high):
        read = other * TILE + tl.arange(0, TILE)
        lag = steps[None, :] - read[:, None]
        if BACKWARD:
            lag = read[:, None] - steps[None, :]
        matrix = tl.load(taps + c * LAGS + lag, mask=(lag >= 0) & (lag < LAGS), other=0.0)
        total = product(_rows(x, first, read, B, C, LENGTH, c, BLOCK), matrix, total, DOT, UPCAST, PRECISION)
    b = (first + tl.arange(0, BLOCK))[:, None]
    place = out + (b.to(tl.int64) * C + c) * LENGTH + steps[None, :]
    tl.store(place, total, mask=(b < B) & (steps < LENGTH)[None, :])


@kernel
def taps_kernel(
    x, d_out, out, B, C, LENGTH, BLOCK: tl.constexpr, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Products of inputs and gradients at a distance of `apart` tiles: ``[C, apart, i, j - i + TILE - 1]``.

    Rows are 2 * TILE wide, so that each lag has a column; the rest of a row is zero.
    """
    c, apart = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([TILE, TILE], tl.float32)
    for first in range(0, B, BLOCK):
        for other in range(0, tl.cdiv(LENGTH, TILE) - apart):
            read = other * TILE + tl.arange(0, TILE)
            inputs = _rows(x, first, read, B, C, LENGTH, c, BLOCK)
            grads = _rows(d_out, first, read + apart * TILE, B, C, LENGTH, c, BLOCK)
            total = product(tl.trans(inputs), grads, total, DOT, UPCAST, PRECISION)
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    row = out + ((c.to(tl.int64) * tl.num_programs(1) + apart) * TILE + i) * 2 * TILE
    column = j - i + TILE - 1
    tl.store(row + column, total)
    tl.store(row + (column + TILE) % (2 * TILE), tl.zeros([TILE, TILE], tl.float32))


def why_not(x: Tensor, taps: Tensor, length: int) -> str | None:
    """Why the kernels cannot make the last `length` outputs of x ``[B, T, C]``, taps ``[C, L]``; None = they can."""
    if x.shape[1] != length:
        return "the kernels have no history"
    if not SHORTEST <= x.shape[1] <= LONGEST:
        return f"the kernels serve {SHORTEST} to {LONGEST} tokens, not {x.shape[1]}"
    if x.shape[0] < FEWEST_ROWS:
        return f"fewer than {FEWEST_ROWS} rows are left to Fourier transforms"
    return why_not_tensors(x, taps)


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """x ``[B, T, C]``, zeros before it, taps ``[C, L]`` by lag -> ``[B, T, C]``.

    Sums are formed in float32; products have the precision of those of float32 matrices
    (`torch.set_float32_matmul_precision`). Gradients reach both.
    """
    return cast(Tensor, _Convolve.apply(x, taps[:, : x.shape[1]].float().contiguous()))


def _transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, P, Q]`` -> ``[B, Q, P]`` in `dtype`, in half the time that torch takes."""
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, p, q = x.shape
    out = torch.empty((batch, q, p), device=x.device, dtype=dtype)
    side = 64
    grid = (batch, triton.cdiv(p, side), triton.cdiv(q, side))
    with on_device(x):
        transpose_kernel[grid](x, out, p, q, x.stride(0), x.stride(1), SIDE=side, num_warps=8)
    return out


def _products(x: Tensor, taps: Tensor, backward: bool) -> Tensor:
    """``[B, C, T]`` -> the convolution, or the gradient of its inputs from that of its outputs."""
    batch, channels, length = x.shape
    out, size = torch.empty_like(x), block(batch, MOST_ROWS // 2 if backward else MOST_ROWS)
    grid = (channels, triton.cdiv(length, TILE.value), triton.cdiv(batch, size))
    with on_device(x):
        toeplitz_kernel[grid](
            x, taps, out, batch, channels, length, taps.shape[1],
            BACKWARD=backward, BLOCK=size, num_warps=8 if size == MOST_ROWS else 4, num_stages=1,
            **arithmetic(torch.float32).constants(),
        )  # fmt: skip
    return out


def _taps_gradient(x: Tensor, d_out: Tensor, lags: int) -> Tensor:
    """``[C, lags]`` from inputs and gradients ``[B, C, T]``."""
    batch, channels, length = x.shape
    tile, tiles = TILE.value, triton.cdiv(length, TILE.value)
    skewed = torch.empty((channels, tiles, tile, 2 * tile), device=x.device, dtype=torch.float32)
    with on_device(x):
        taps_kernel[(channels, tiles)](
            x, d_out, skewed, batch, channels, length,
            BLOCK=block(batch, MOST_ROWS // 2), num_warps=4, num_stages=1, **arithmetic(torch.float32).constants(),
        )  # fmt: skip
    # Column n of distance `apart` is the lag (apart - 1) * tile + 1 + n; lags of neighbouring distances overlap by
    # half.
    sums = skewed.sum(2)
    later = torch.cat([sums[:, 1:, : tile - 1], sums.new_zeros(channels, 1, tile - 1)], dim=1)
    found = sums[..., tile - 1 : -1]
    return torch.cat([found[..., :1], found[..., 1:] + later], dim=2).flatten(1)[:, :lags]


class _Convolve(torch.autograd.Function):
    """x ``[B, T, C]``, taps float32 ``[C, L]``, L <= T -> ``[B, T, C]`` in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        by_channel = _transposed(x, torch.float32)
        ctx.save_for_backward(by_channel, taps)
        return _transposed(_products(by_channel, taps, False), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        by_channel, taps = ctx.saved_tensors
        grads = _transposed(d_out, torch.float32)
        d_x = _transposed(_products(grads, taps, True), d_out.dtype) if ctx.needs_input_grad[0] else None
        d_taps = _taps_gradient(by_channel, grads, taps.shape[1]) if ctx.needs_input_grad[1] else None
        return d_x, d_taps
