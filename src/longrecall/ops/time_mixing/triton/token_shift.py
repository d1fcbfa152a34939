"""Mixtures of a token and the one before in one pass over memory, forward and backward.

The gradients of shares are sums over tokens: every program adds up its own, and torch adds up the
programs. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, walkers, why_not_tensors

MOST_MIXTURES = 4
"""The most mixtures: a program holds the gradients of all their shares in registers."""

ROWS, COLUMNS = 16, 64
"""Tokens and channels of a tile."""

PROGRAMS = 8
"""Programs of a backward launch for each multiprocessor: enough to keep memory busy, few partial sums."""


@triton.jit
def _tokens(x, rows, there, channel, D):
    """The tile of tokens `rows` of ``[N, D]``, 0 outside of the tensor."""
    return tl.load(x + rows * D + channel, mask=there & (channel < D), other=0.0).to(tl.float32)


@triton.jit
def _share(shares, index, channel, D):
    return tl.load(shares + index * D + channel, mask=channel < D, other=0.0).to(tl.float32)


@kernel
def mix_kernel(x, shares, out, N, T, D, MIXTURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile of every mixture; `out` ``[MIXTURES, N, D]`` for N tokens in texts of T."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = rows < N
    here = _tokens(x, rows, inside, channel, D)
    change = _tokens(x, rows - 1, inside & (rows % T > 0), channel, D) - here
    for index in tl.static_range(MIXTURES):
        y = here + change * _share(shares, index, channel, D)
        place = out + (rows + index * N) * D + channel
        tl.store(place, y.to(out.dtype.element_ty), mask=inside & (channel < D))


@triton.jit
def _mixture_gradient(d_out, share, rows, inside, later, channel, D, change):
    """What a mixture adds to the gradient of x, and of its share token by token."""
    here = _tokens(d_out, rows, inside, channel, D)
    after = _tokens(d_out, rows + 1, later, channel, D)
    return here + share * (after - here), here * change


@kernel
def mix_backward_kernel(
    x, shares, d0, d1, d2, d3, d_x, sums, N, T, D,
    MIXTURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile; `sums` float32 ``[programs, 4, D]``."""
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    none = tl.zeros([ROWS, COLUMNS], tl.float32)
    s0, s1, s2, s3 = none, none, none, none
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        inside = rows < N
        later = inside & (rows % T + 1 < T)
        here = _tokens(x, rows, inside, channel, D)
        change = _tokens(x, rows - 1, inside & (rows % T > 0), channel, D) - here
        to_x, added = _mixture_gradient(d0, _share(shares, 0, channel, D), rows, inside, later, channel, D, change)
        s0 += added
        if MIXTURES > 1:
            more, added = _mixture_gradient(d1, _share(shares, 1, channel, D), rows, inside, later, channel, D, change)
            to_x += more
            s1 += added
        if MIXTURES > 2:
            more, added = _mixture_gradient(d2, _share(shares, 2, channel, D), rows, inside, later, channel, D, change)
            to_x += more
            s2 += added
        if MIXTURES > 3:
            more, added = _mixture_gradient(d3, _share(shares, 3, channel, D), rows, inside, later, channel, D, change)
            to_x += more
            s3 += added
        tl.store(d_x + rows * D + channel, to_x.to(d_x.dtype.element_ty), mask=inside & (channel < D))
    place = sums + tl.program_id(0) * 4 * D + channel
    tl.store(place, tl.sum(s0, 0)[None, :], mask=channel < D)
    tl.store(place + D, tl.sum(s1, 0)[None, :], mask=channel < D)
    tl.store(place + 2 * D, tl.sum(s2, 0)[None, :], mask=channel < D)
    tl.store(place + 3 * D, tl.sum(s3, 0)[None, :], mask=channel < D)


def why_not(x: Tensor, shares: Tensor) -> str | None:
    """Why the kernels cannot mix x ``[B, T, d]`` by shares ``[M, d]``, in words; None = they can."""
    if not 1 <= len(shares) <= MOST_MIXTURES:
        return f"the kernels make 1 to {MOST_MIXTURES} mixtures, not {len(shares)}"
    return why_not_tensors(x, shares)


def mix_with_previous(x: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
    """`ops.time_mixing.op.mix_with_previous`."""
    return cast(tuple[Tensor, ...], _Mix.apply(x.contiguous(), shares.contiguous()))


class _Mix(torch.autograd.Function):
    """x ``[B, T, d]``, shares ``[M, d]`` -> M mixtures."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, shares)
        batch, length, width = x.shape
        out = x.new_empty((len(shares), batch, length, width))
        tokens = batch * length
        with on_device(x):
            mix_kernel[(triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS))](
                x, shares, out, tokens, length, width,
                MIXTURES=len(shares), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
        return tuple(out.unbind(0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, shares = ctx.saved_tensors
        batch, length, width = x.shape
        tokens, columns = batch * length, triton.cdiv(width, COLUMNS)
        count = walkers(x, triton.cdiv(tokens, ROWS), columns, PROGRAMS)
        d_x = torch.empty_like(x)
        sums = torch.empty((count, MOST_MIXTURES, width), device=x.device, dtype=torch.float32)
        given = [d.contiguous() for d in grads]
        with on_device(x):
            mix_backward_kernel[(count, columns)](
                x, shares, *given, *given[:1] * (MOST_MIXTURES - len(given)), d_x, sums, tokens, length, width,
                MIXTURES=len(shares), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
        return d_x, sums.sum(0)[: len(shares)].to(shares.dtype)
