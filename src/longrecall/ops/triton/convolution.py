"""Short convolution, SiLU and the L2 norm of every head in one pass over memory, forward and backward.

Between two large products this is all that happens to queries, keys and values, and it is bound by memory traffic. A
program walks over consecutive tokens of a few heads, four at a time with the next four on their way, and keeps the last
inputs in registers: every number is read once and written once. The backward walks the other way, computes the forward
again, and keeps nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.triton.launch import interpreting, kernel, on_device, processors

WIDTH = 4
"""Taps of the convolution; another width has no kernel."""

SEGMENT = 128
"""Tokens a program walks over, a multiple of the 4 that it takes at a time: long beside the W - 1 that neighbours read
twice, short enough for many programs."""

SHORTEST = 8
"""Tokens of a forward program of a short text, which would have too few programs otherwise."""

PROGRAMS = 8
"""Warps for each multiprocessor below which programs are made shorter: with fewer, memory is waited for."""


INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def _row(x, b, t, low, T, channel, SIZE: tl.constexpr):
    """Numbers of one token of ``[B, T, SIZE]``; 0 before token `low` and from T on."""
    times = t + tl.zeros_like(channel)
    return tl.load(x + (b * T + t) * SIZE + channel, mask=(times >= low) & (times < T), other=0.0)


@triton.jit
def _input(z, state, b, t, low, T, channel, SIZE: tl.constexpr):
    """Inputs of one token, those before the first from the state ``[B, 3, SIZE]``; 0 before `low` and from T on."""
    row = z + (b * T + t) * SIZE
    if t < 0:
        row = state + (b * 3 + 3 + t) * SIZE
    times = t + tl.zeros_like(channel)
    return tl.load(row + channel, mask=(times >= low) & (times >= -3) & (times < T), other=0.0)


@triton.jit
def _before(z, state, b, t, T, channel, SIZE: tl.constexpr):
    """Inputs of token t >= -3, those before the first from a state as layers keep it, ``[B, SIZE, 3]``; 0 from T on."""
    x = _row(z, b, t, 0, T, channel, SIZE)
    if t < 0:
        x = tl.load(state + (b * SIZE + channel) * 3 + 3 + t)
    return x


@triton.jit
def _taps(weight, channel):
    """Four columns of ``[SIZE, 4]``."""
    place = weight + channel * 4
    tap0, tap1 = tl.load(place).to(tl.float32), tl.load(place + 1).to(tl.float32)
    tap2, tap3 = tl.load(place + 2).to(tl.float32), tl.load(place + 3).to(tl.float32)
    return tap0, tap1, tap2, tap3


@triton.jit
def _sigmoid(c):
    """Four instructions of Hopper's; those that Triton makes of the formula, right for denormals too, are a dozen.

    They would be a third of all, and the kernels as much bound by instructions as by memory.
    """
    if INTERPRETED:
        gate = 1.0 / (1.0 + tl.exp(-c))
    else:
        # 1 / (1 + 2^(-c log2 e)); a denormal power is nothing beside 1, an infinite one gives 0.
        gate = tl.inline_asm_elementwise(
            "{ .reg .f32 p; mul.ftz.f32 p, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 p, p; add.ftz.f32 p, p, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, p; }",
            "=f,f", [c], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return gate


@triton.jit
def _convolve(x0, x1, x2, x3, taps):
    """The convolution's output at the token of x3, and its sigmoid."""
    c = x0 * taps[0]
    c += x1 * taps[1]
    c += x2 * taps[2]
    c += x3 * taps[3]
    return c, _sigmoid(c)


@triton.jit
def _forward_token(out, b, t, T, x0, x1, x2, x3, taps, channel, eps, SIZE: tl.constexpr, NORMALISE: tl.constexpr):
    c, gate = _convolve(x0, x1, x2, x3, taps)
    y = c * gate
    if NORMALISE:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    times = t + tl.zeros_like(channel)
    tl.store(out + (b * T + t) * SIZE + channel, y.to(out.dtype.element_ty), mask=times < T)


@kernel
def _forward_kernel(
    z, weight, state, out, T, eps,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    start, b = tl.program_id(0) * LENGTH, tl.program_id(2).to(tl.int64)
    channel = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None] * D + tl.arange(0, D)[None, :]
    SIZE: tl.constexpr = HEADS * D
    taps = _taps(weight, channel)
    x0 = _before(z, state, b, start - 3, T, channel, SIZE)
    x1 = _before(z, state, b, start - 2, T, channel, SIZE)
    x2 = _before(z, state, b, start - 1, T, channel, SIZE)
    a0, a1 = _row(z, b, start, start, T, channel, SIZE), _row(z, b, start + 1, start, T, channel, SIZE)
    a2, a3 = _row(z, b, start + 2, start, T, channel, SIZE), _row(z, b, start + 3, start, T, channel, SIZE)
    x0, x1, x2 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    for t in range(start, tl.minimum(start + LENGTH, T), 4):
        # Asked for before the present tokens are worked on, so that memory is not waited for.
        n0, n1 = _row(z, b, t + 4, t, T, channel, SIZE), _row(z, b, t + 5, t, T, channel, SIZE)
        n2, n3 = _row(z, b, t + 6, t, T, channel, SIZE), _row(z, b, t + 7, t, T, channel, SIZE)
        _forward_token(out, b, t, T, x0, x1, x2, a0, taps, channel, eps, SIZE, NORMALISE)
        _forward_token(out, b, t + 1, T, x1, x2, a0, a1, taps, channel, eps, SIZE, NORMALISE)
        _forward_token(out, b, t + 2, T, x2, a0, a1, a2, taps, channel, eps, SIZE, NORMALISE)
        _forward_token(out, b, t + 3, T, a0, a1, a2, a3, taps, channel, eps, SIZE, NORMALISE)
        x0, x1, x2 = a1, a2, a3
        a0, a1, a2, a3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)


@triton.jit
def _to_convolution(d, x0, x1, x2, x3, taps, eps, NORMALISE: tl.constexpr):
    """The gradient of the convolution's output at one token from that of the result, `d`."""
    c, gate = _convolve(x0, x1, x2, x3, taps)
    d = d.to(tl.float32)
    if NORMALISE:
        y = c * gate
        inverse = tl.rsqrt(tl.sum(y * y, 1) + eps)
        d = inverse[:, None] * (d - y * (inverse * inverse * tl.sum(d * y, 1))[:, None])
    return d * gate * (1.0 + c * (1.0 - gate))


@triton.jit
def _backward_token(d_z, b, t, T, d, later, x0, x1, x2, x3, taps, sums, channel, eps,
                    SIZE: tl.constexpr, NORMALISE: tl.constexpr):  # fmt: skip
    """Store the gradient of one input; `later` are the convolution's gradients at the next three tokens.

    Returns `later` for the token before, and the sums of the taps' gradients.
    """
    d0 = _to_convolution(d, x0, x1, x2, x3, taps, eps, NORMALISE)
    to_input = taps[3] * d0 + taps[2] * later[0] + taps[1] * later[1] + taps[0] * later[2]
    times = t + tl.zeros_like(channel)
    tl.store(d_z + (b * T + t) * SIZE + channel, to_input.to(d_z.dtype.element_ty), mask=times < T)
    sums = (sums[0] + d0 * x0, sums[1] + d0 * x1, sums[2] + d0 * x2, sums[3] + d0 * x3)
    return (d0, later[0], later[1]), sums


@kernel
def _backward_kernel(
    z, weight, state, d_out, d_z, d_state, d_weight, T, eps,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """From the last token to the first: an input's gradient comes from the convolution at its token and the next three.

    Tokens from T on have no gradient, so they change no sum.
    """
    start, b = tl.program_id(0) * LENGTH, tl.program_id(2).to(tl.int64)
    channel = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None] * D + tl.arange(0, D)[None, :]
    SIZE: tl.constexpr = HEADS * D
    taps = _taps(weight, channel)
    top, low = start + tl.cdiv(tl.minimum(LENGTH, T - start), 4) * 4, start - 3
    p0, p1 = _row(z, b, top, low, T, channel, SIZE), _row(z, b, top + 1, low, T, channel, SIZE)
    p2 = _row(z, b, top + 2, low, T, channel, SIZE)
    a3, a2 = _row(z, b, top - 1, low, T, channel, SIZE), _row(z, b, top - 2, low, T, channel, SIZE)
    a1, a0 = _row(z, b, top - 3, low, T, channel, SIZE), _row(z, b, top - 4, low, T, channel, SIZE)
    b3 = _input(z, state, b, top - 5, low, T, channel, SIZE)
    b2 = _input(z, state, b, top - 6, low, T, channel, SIZE)
    b1 = _input(z, state, b, top - 7, low, T, channel, SIZE)
    b0 = _input(z, state, b, top - 8, low, T, channel, SIZE)
    e3, e2 = _row(d_out, b, top - 1, start, T, channel, SIZE), _row(d_out, b, top - 2, start, T, channel, SIZE)
    e1, e0 = _row(d_out, b, top - 3, start, T, channel, SIZE), _row(d_out, b, top - 4, start, T, channel, SIZE)
    p0, p1, p2 = p0.to(tl.float32), p1.to(tl.float32), p2.to(tl.float32)
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    b0, b1, b2, b3 = b0.to(tl.float32), b1.to(tl.float32), b2.to(tl.float32), b3.to(tl.float32)
    # Computed even where all are zero: Triton 3.6 drops values that begin as one constant and move on from one name to
    # the next, as these do.
    later = (
        _to_convolution(_row(d_out, b, top, start, T, channel, SIZE), a1, a2, a3, p0, taps, eps, NORMALISE),
        _to_convolution(_row(d_out, b, top + 1, start, T, channel, SIZE), a2, a3, p0, p1, taps, eps, NORMALISE),
        _to_convolution(_row(d_out, b, top + 2, start, T, channel, SIZE), a3, p0, p1, p2, taps, eps, NORMALISE),
    )
    none = tl.zeros([GROUP, D], tl.float32)
    sums = (none, none, none, none)
    for step in range((top - start) // 4):
        t = top - 4 - 4 * step
        # Asked for before the present tokens are worked on, so that memory is not waited for.
        n3, n2 = _input(z, state, b, t - 5, low, T, channel, SIZE), _input(z, state, b, t - 6, low, T, channel, SIZE)
        n1, n0 = _input(z, state, b, t - 7, low, T, channel, SIZE), _input(z, state, b, t - 8, low, T, channel, SIZE)
        f3, f2 = _row(d_out, b, t - 1, start, T, channel, SIZE), _row(d_out, b, t - 2, start, T, channel, SIZE)
        f1, f0 = _row(d_out, b, t - 3, start, T, channel, SIZE), _row(d_out, b, t - 4, start, T, channel, SIZE)
        later, sums = _backward_token(d_z, b, t + 3, T, e3, later, a0, a1, a2, a3, taps, sums, channel, eps,
                                      SIZE, NORMALISE)  # fmt: skip
        later, sums = _backward_token(d_z, b, t + 2, T, e2, later, b3, a0, a1, a2, taps, sums, channel, eps,
                                      SIZE, NORMALISE)  # fmt: skip
        later, sums = _backward_token(d_z, b, t + 1, T, e1, later, b2, b3, a0, a1, taps, sums, channel, eps,
                                      SIZE, NORMALISE)  # fmt: skip
        later, sums = _backward_token(d_z, b, t, T, e0, later, b1, b2, b3, a0, taps, sums, channel, eps,
                                      SIZE, NORMALISE)  # fmt: skip
        a0, a1, a2, a3 = b0, b1, b2, b3
        b0, b1, b2, b3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        e0, e1, e2, e3 = f0, f1, f2, f3
    if start == 0:
        place = d_state + b * 3 * SIZE + channel
        tl.store(place + 2 * SIZE, taps[2] * later[0] + taps[1] * later[1] + taps[0] * later[2])
        tl.store(place + SIZE, taps[1] * later[0] + taps[0] * later[1])
        tl.store(place, taps[0] * later[0])
    place = d_weight + (b * tl.num_programs(0) + tl.program_id(0)) * 4 * SIZE + channel
    tl.store(place, sums[0])
    tl.store(place + SIZE, sums[1])
    tl.store(place + 2 * SIZE, sums[2])
    tl.store(place + 3 * SIZE, sums[3])


def convolve_heads(z: Tensor, weight: Tensor, state: Tensor | None, *, normalise: bool, eps: float = 1e-6) -> Tensor:
    """Causal depthwise convolution, SiLU and, where asked for, x / sqrt(sum x^2 + eps) per head.

    The same numbers as `short_convolution` and `layers.norm.l2_normalise`, rounded once, at the end. Gradients reach z,
    the weight and the state.

    Args:
        z: ``[B, T, H, D]``, D a power of two.
        weight: ``[H * D, 4]``, the newest input last.
        state: ``[B, H * D, 3]``, the inputs before z; None = zeros.
        normalise: whether to divide every head by its L2 norm.
        eps: keeps the norm of a head of zeros finite.

    Returns:
        ``[B, T, H, D]`` in the dtype of z.
    """
    if state is None:
        state = z.new_zeros((z.shape[0], weight.shape[0], WIDTH - 1))
    inputs = (z.contiguous(), weight.contiguous(), state.to(z.dtype).contiguous())
    return cast(Tensor, _ConvolveHeads.apply(normalise, eps, *inputs))


def _group(heads: int, width: int) -> int:
    """Heads of a program: a warp for every 128 channels, which sums a head's norm by itself; many programs fit."""
    return next(n for n in (8, 4, 2, 1) if heads % n == 0 and (n == 1 or n * width <= 128))


def _length(z: Tensor) -> int:
    """Tokens of a forward program: as many as leave every multiprocessor its `PROGRAMS` warps, within bounds."""
    rows, length, heads, width = z.shape
    warps = rows * heads * width // 128
    wanted = PROGRAMS * processors(z)
    lengths = (n for n in (SEGMENT, 64, 32, 16) if warps * triton.cdiv(length, n) >= wanted)
    return next(lengths, SHORTEST)


def _launch(z: Tensor, tokens: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid and the constants of both kernels, whose programs walk over so many tokens."""
    rows, length, heads, width = z.shape
    group = _group(heads, width)
    constants = {
        "HEADS": heads,
        "D": width,
        "GROUP": group,
        "LENGTH": tokens,
        "num_warps": max(1, group * width // 128),
    }
    return (triton.cdiv(length, tokens), heads // group, rows), constants


class _ConvolveHeads(torch.autograd.Function):
    """Normalise, eps, z, weight ``[H * D, 4]``, state ``[B, H * D, 3]`` -> `convolve_heads`."""

    @staticmethod
    def forward(ctx: Any, normalise: bool, eps: float, *inputs: Tensor) -> Tensor:
        ctx.normalise, ctx.eps = normalise, eps
        ctx.save_for_backward(*inputs)
        z, weight, state = inputs
        out = torch.empty_like(z)
        grid, constants = _launch(z, _length(z))
        with on_device(z):
            _forward_kernel[grid](z, weight, state, out, z.shape[1], eps, NORMALISE=normalise, **constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, state = ctx.saved_tensors
        grid, constants = _launch(z, SEGMENT)
        # Neighbouring channels side by side, as in z: one layout serves all that the kernel's loop reads.
        state = state.transpose(1, 2).contiguous()
        d_z, d_state = torch.empty_like(z), torch.empty_like(state)
        d_weight = torch.empty((grid[2] * grid[0], WIDTH, len(weight)), device=z.device, dtype=torch.float32)
        with on_device(z):
            _backward_kernel[grid](
                z, weight, state, grads[0].contiguous(), d_z, d_state, d_weight, z.shape[1], ctx.eps,
                NORMALISE=ctx.normalise, **constants,
            )  # fmt: skip
        return None, None, d_z, d_weight.sum(0).t().to(weight.dtype), d_state.transpose(1, 2)
