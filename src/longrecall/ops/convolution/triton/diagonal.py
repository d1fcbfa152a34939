r"""Taps of a diagonal state space, :math:`h_l = 2 Re \sum_m g_m \lambda_m^l`, and their gradients.

There are many more powers of eigenvalues, H * M * L, than taps. Plain torch writes and reads them a dozen times. Here
they exist in registers only, and the backward pass computes them again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors

LAGS, PAIRS = 64, 32
"""Lags and eigenvalues of a tile."""


@triton.jit
def _powers(rate, angle, row, pair, M, lag):
    """Real and imaginary part ``[lags, pairs]`` of the eigenvalues to the power of the lags; 0 past the last one."""
    inside = pair < M
    size = tl.exp(-tl.load(rate + row + pair, mask=inside, other=0.0) * lag)
    turn = tl.load(angle + row + pair, mask=inside, other=0.0) * lag
    return tl.where(inside, size * tl.cos(turn), 0.0), tl.where(inside, size * tl.sin(turn), 0.0)


@triton.jit
def _gains(gain, row, pair, M):
    place = gain + 2 * (row + pair)
    return tl.load(place, mask=pair < M, other=0.0), tl.load(place + 1, mask=pair < M, other=0.0)


@kernel
def diagonal_taps_kernel(rate, angle, gain, taps, M, S, LAGS: tl.constexpr, PAIRS: tl.constexpr):
    """A tile of S lags of one head; `rate`, `angle` ``[H, M]``, `gain` ``[H, M, 2]``, `taps` ``[H, S]``."""
    head = tl.program_id(1).to(tl.int64)
    lags = tl.program_id(0) * LAGS + tl.arange(0, LAGS)
    total = tl.zeros([LAGS, PAIRS], tl.float32)
    for first in range(0, M, PAIRS):
        pair = (first + tl.arange(0, PAIRS))[None, :]
        real, imaginary = _powers(rate, angle, head * M, pair, M, lags[:, None].to(tl.float32))
        gain_real, gain_imaginary = _gains(gain, head * M, pair, M)
        total += gain_real * real - gain_imaginary * imaginary
    tl.store(taps + head * S + lags, 2.0 * tl.sum(total, 1), mask=lags < S)


@kernel
def diagonal_gradients_kernel(
    rate, angle, gain, d_taps, d_rate, d_angle, d_gain, M, S, LAGS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Gradients of a tile of the eigenvalues of one head, summed over all lags."""
    head = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    pair = pairs[None, :]
    gain_real, gain_imaginary = _gains(gain, head * M, pair, M)
    to_rate = tl.zeros([LAGS, PAIRS], tl.float32)
    to_angle, to_real, to_imaginary = to_rate, to_rate, to_rate
    for first in range(0, S, LAGS):
        lag = (first + tl.arange(0, LAGS))[:, None]
        d = 2.0 * tl.load(d_taps + head * S + lag, mask=lag < S, other=0.0)
        times = lag.to(tl.float32)
        real, imaginary = _powers(rate, angle, head * M, pair, M, times)
        to_real += d * real
        to_imaginary -= d * imaginary
        to_rate -= d * times * (gain_real * real - gain_imaginary * imaginary)
        to_angle -= d * times * (gain_real * imaginary + gain_imaginary * real)
    place, inside = head * M + pairs, pairs < M
    tl.store(d_rate + place, tl.sum(to_rate, 0), mask=inside)
    tl.store(d_angle + place, tl.sum(to_angle, 0), mask=inside)
    tl.store(d_gain + 2 * place, tl.sum(to_real, 0), mask=inside)
    tl.store(d_gain + 2 * place + 1, tl.sum(to_imaginary, 0), mask=inside)


def why_not(rate: Tensor, angle: Tensor, gain: Tensor) -> str | None:
    """Why the kernels cannot compute taps from these tensors, in words; None = they can."""
    return why_not_tensors(rate, angle, gain)


def taps(rate: Tensor, angle: Tensor, gain: Tensor, length: int) -> Tensor:
    """`diagonal.diagonal_taps` in float32: rate, angle ``[H, M]``, gain ``[H, M, 2]`` -> ``[H, length]``."""
    return cast(Tensor, _Taps.apply(length, *(x.float().contiguous() for x in (rate, angle, gain))))


class _Taps(torch.autograd.Function):
    """Length; rate and angle ``[H, M]``, gain ``[H, M, 2]``, float32 -> ``[H, length]``."""

    @staticmethod
    def forward(ctx: Any, length: int, rate: Tensor, angle: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(rate, angle, gain)
        heads, pairs = rate.shape
        out = rate.new_empty((heads, length))
        with on_device(rate):
            diagonal_taps_kernel[(triton.cdiv(length, LAGS), heads)](
                rate, angle, gain, out, pairs, length, LAGS=LAGS, PAIRS=PAIRS, num_warps=4
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_taps: Tensor) -> tuple[Tensor | None, ...]:
        rate, angle, gain = ctx.saved_tensors
        heads, pairs = rate.shape
        d_rate, d_angle, d_gain = (torch.empty_like(x) for x in (rate, angle, gain))
        with on_device(rate):
            diagonal_gradients_kernel[(heads, triton.cdiv(pairs, PAIRS))](
                rate, angle, gain, d_taps.contiguous(), d_rate, d_angle, d_gain, pairs, d_taps.shape[1],
                LAGS=LAGS, PAIRS=PAIRS, num_warps=4,
            )  # fmt: skip
        return None, d_rate, d_angle, d_gain
