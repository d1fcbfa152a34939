"""The two gates of Gated DeltaNet in one launch, forward and backward; plain torch needs nine.

They are small, a number or two for each head of a token, so that launches take most of the time. The gradients of the
rate and the bias of a head are sums over tokens: every program adds up its own tokens, and torch adds up the programs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors

TILE = 512
"""Numbers of each gate that a program computes: tokens times heads."""

MOST_HEADS = 8192
"""The most heads: a tile holds all heads of a token."""


@triton.jit
def _tile(N, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and heads of a program's tile, and which of them are inside."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    heads = tl.arange(0, BLOCK)[None, :]
    return rows, heads, (rows < N) & (heads < H)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x), with no exponential that could overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _step(decay, bias, place, heads, inside, H: tl.constexpr):
    """softplus(a + bias) and its derivative, as torch computes them: past 20 the softplus is a + bias itself."""
    x = tl.load(decay + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + heads, mask=heads < H, other=0.0).to(tl.float32)
    small = tl.exp(tl.minimum(x, 20.0))
    # In 1 + e the last digits of e are lost; the correction below restores them.
    whole = 1.0 + small
    log = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, log), _sigmoid(x)


@kernel
def gates_kernel(
    decay, write, log_rate, bias, log_decay, beta, N, decay_row, write_row, factor,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both gates of a tile of tokens; rows of `decay` and `write` may be parts of wider ones."""
    rows, heads, inside = _tile(N, H, ROWS, BLOCK)
    step, _slope = _step(decay, bias, rows * decay_row + heads, heads, inside, H)
    rate = tl.exp(tl.load(log_rate + heads, mask=heads < H, other=0.0).to(tl.float32))
    raw = tl.load(write + rows * write_row + heads, mask=inside, other=0.0).to(tl.float32)
    tl.store(log_decay + rows * H + heads, -rate * step, mask=inside)
    tl.store(beta + rows * H + heads, factor * _sigmoid(raw), mask=inside)


@kernel
def gates_backward_kernel(
    decay, write, log_rate, bias, d_log_decay, d_beta, d_decay, d_write, sums, N, decay_row, write_row, factor,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of tokens; its sums for rate and bias go to `sums` float32 ``[programs, 2, H]``."""
    rows, heads, inside = _tile(N, H, ROWS, BLOCK)
    step, slope = _step(decay, bias, rows * decay_row + heads, heads, inside, H)
    rate = tl.exp(tl.load(log_rate + heads, mask=heads < H, other=0.0).to(tl.float32))
    d = -rate * tl.load(d_log_decay + rows * H + heads, mask=inside, other=0.0)
    s = _sigmoid(tl.load(write + rows * write_row + heads, mask=inside, other=0.0).to(tl.float32))
    d_strength = tl.load(d_beta + rows * H + heads, mask=inside, other=0.0) * factor
    tl.store(d_decay + rows * H + heads, (d * slope).to(d_decay.dtype.element_ty), mask=inside)
    tl.store(d_write + rows * H + heads, (d_strength * s * (1.0 - s)).to(d_write.dtype.element_ty), mask=inside)
    place = sums + tl.program_id(0) * 2 * H + heads
    tl.store(place, tl.sum(d * step, 0)[None, :], mask=heads < H)
    tl.store(place + H, tl.sum(d * slope, 0)[None, :], mask=heads < H)


def why_not(decay: Tensor, write: Tensor, **_: Any) -> str | None:
    """Why the kernels cannot make these gates, in words; None = they can."""
    if decay.shape[-1] > MOST_HEADS:
        return f"{decay.shape[-1]} heads are too many; the kernels hold up to {MOST_HEADS}"
    return why_not_tensors(decay, write)


def delta_gates(decay: Tensor, write: Tensor, log_rate: Tensor, bias: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See `ops.delta_rule.gates.delta_gates`."""
    heads = decay.shape[-1]
    # Rows that are part of a wider projection are read in place.
    rows = [x if x.stride(1) == 1 else x.contiguous() for x in (y.reshape(-1, heads) for y in (decay, write))]
    both = cast(tuple[Tensor, Tensor], _DeltaGates.apply(factor, *rows, log_rate.contiguous(), bias.contiguous()))
    return both[0].view(decay.shape), both[1].view(decay.shape)


def _launch(rows: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the constants of both kernels."""
    block = triton.next_power_of_2(rows.shape[1])
    tile = max(1, TILE // block)
    return (triton.cdiv(len(rows), tile),), {"H": rows.shape[1], "ROWS": tile, "BLOCK": block, "num_warps": 4}


class _DeltaGates(torch.autograd.Function):
    """Factor; a, b ``[N, H]``, A, d ``[H]`` -> log decay and beta ``[N, H]``, float32."""

    @staticmethod
    def forward(ctx: Any, factor: float, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        decay, write, log_rate, bias = inputs
        ctx.factor = factor
        ctx.save_for_backward(*inputs)
        log_decay, beta = (decay.new_empty(decay.shape, dtype=torch.float32) for _ in range(2))
        grid, constants = _launch(decay)
        with on_device(decay):
            gates_kernel[grid](
                decay, write, log_rate, bias, log_decay, beta,
                len(decay), decay.stride(0), write.stride(0), factor, **constants,
            )  # fmt: skip
        return log_decay, beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        decay, write, log_rate, bias = ctx.saved_tensors
        d_log_decay, d_beta = (x.contiguous() for x in grads)
        d_decay, d_write = (x.new_empty(x.shape) for x in (decay, write))
        grid, constants = _launch(decay)
        sums = torch.empty((grid[0], 2, decay.shape[1]), device=decay.device, dtype=torch.float32)
        with on_device(decay):
            gates_backward_kernel[grid](
                decay, write, log_rate, bias, d_log_decay, d_beta, d_decay, d_write, sums,
                len(decay), decay.stride(0), write.stride(0), ctx.factor, **constants,
            )  # fmt: skip
        d_rate, d_bias = sums.sum(0)
        return None, d_decay, d_write, d_rate.to(log_rate.dtype), d_bias.to(bias.dtype)
