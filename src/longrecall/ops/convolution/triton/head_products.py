"""Products of all pairs of a head's channels, and reading them, in one pass over memory, forward and backward.

Numbers are counted in their order in memory: pair e of ``[..., H, P, P]`` belongs to the left channel e / P and to the
right channel e / P^2 * P + e modulo P. A program reads its few left and right channels anew for every pair, from the
cache.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors

WIDEST = 16
"""The most channels of a head: the kernels loop over them."""

BLOCK = 512
"""Left or right channels of a program."""

MOST_PAIRS = 2**31 - 1
"""The most pairs: their number is an int32 in the kernels."""


@triton.jit
def _left(q, place, inside, WIDTH: tl.constexpr):
    """The left channel of every pair."""
    return tl.load(q + place // WIDTH, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _right(v, place, inside, WIDTH: tl.constexpr):
    """The right channel of every pair."""
    return tl.load(v + place // (WIDTH * WIDTH) * WIDTH + place % WIDTH, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _over_right(pairs, v, channel, inside, WIDTH: tl.constexpr):
    """For left channels: the sum over j of pair (i, j) times v_j."""
    total = tl.zeros_like(channel).to(tl.float32)
    for j in tl.static_range(WIDTH):
        d = tl.load(pairs + channel * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
        total += d * tl.load(v + channel // WIDTH * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _over_left(pairs, q, channel, inside, WIDTH: tl.constexpr):
    """For right channels: the sum over i of pair (i, j) times q_i."""
    total = tl.zeros_like(channel).to(tl.float32)
    first = channel // WIDTH * WIDTH
    for i in tl.static_range(WIDTH):
        d = tl.load(pairs + (first + i) * WIDTH + channel % WIDTH, mask=inside, other=0.0).to(tl.float32)
        total += d * tl.load(q + first + i, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _store(out, place, value, inside):
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@kernel
def pair_products_kernel(k, v, out, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """All pairs of `size` channels."""
    place = tl.program_id(0).to(tl.int64) * BLOCK * WIDTH + tl.arange(0, BLOCK * WIDTH)
    inside = place < size * WIDTH
    _store(out, place, _left(k, place, inside, WIDTH) * _right(v, place, inside, WIDTH), inside)


@kernel
def pair_gradients_kernel(k, v, d_out, d_k, d_v, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of both channels from that of their pairs."""
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    _store(d_k, channel, _over_right(d_out, v, channel, inside, WIDTH), inside)
    _store(d_v, channel, _over_left(d_out, k, channel, inside, WIDTH), inside)


@kernel
def read_pairs_kernel(q, y, out, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """What left channels read from pairs."""
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    _store(out, channel, _over_left(y, q, channel, inside, WIDTH), inside)


@kernel
def read_gradients_kernel(q, y, d_out, d_q, d_y, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of left channels and of the pairs from that of what was read."""
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    _store(d_q, channel, _over_right(y, d_out, channel, inside, WIDTH), inside)
    place = tl.program_id(0).to(tl.int64) * BLOCK * WIDTH + tl.arange(0, BLOCK * WIDTH)
    within = place < size * WIDTH
    _store(d_y, place, _left(q, place, within, WIDTH) * _right(d_out, place, within, WIDTH), within)


def why_not(k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take heads ``[..., P]`` (and pairs of them), in words; None = they can."""
    width = k.shape[-1]
    if width > WIDEST or width & (width - 1):
        return f"heads must have a power of two of channels, up to {WIDEST}, not {width}"
    if k.numel() * width > MOST_PAIRS:
        return f"{k.numel() * width} pairs are more than the kernels can number ({MOST_PAIRS})"
    return why_not_tensors(k, v)


def pair_products(k: Tensor, v: Tensor) -> Tensor:
    """`ops.convolution.head_products.pair_products`."""
    size = k.shape[-1] ** 2
    return cast(Tensor, _Pairs.apply(pair_products_kernel, pair_gradients_kernel, size, k.contiguous(), v.contiguous()))


def read_pairs(q: Tensor, y: Tensor) -> Tensor:
    """`ops.convolution.head_products.read_pairs`."""
    return cast(
        Tensor, _Pairs.apply(read_pairs_kernel, read_gradients_kernel, q.shape[-1], q.contiguous(), y.contiguous())
    )


def _launch(kernel: Any, *tensors: Tensor) -> None:
    """A kernel over as many channels as its first tensor has."""
    first = tensors[0]
    with on_device(first):
        kernel[(triton.cdiv(first.numel(), BLOCK),)](
            *tensors, first.numel(), WIDTH=first.shape[-1], BLOCK=BLOCK, num_warps=4
        )


class _Pairs(torch.autograd.Function):
    """Kernels of a forward, which makes `size` numbers per head from two tensors, and of its backward."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, size: int, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.kernel = backward
        out = x.new_empty((*x.shape[:-1], size))
        _launch(forward, x, y, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[None, None, None, Tensor, Tensor]:
        x, y = ctx.saved_tensors
        d_x, d_y = torch.empty_like(x), torch.empty_like(y)
        _launch(ctx.kernel, x, y, d_out.contiguous(), d_x, d_y)
        return None, None, None, d_x, d_y
