"""Short convolution, SiLU and the L2 norm of every head in one pass over memory, forward and backward.

Between two large products this is all that happens to queries, keys and values, and memory traffic takes most of its
time. A program walks over consecutive tokens of a few heads. It takes four at a time while the next four are loaded,
and keeps the last inputs in registers. So every number is read once and written once. The backward walks the other way
and computes the forward again, so that nothing is kept for it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import MOST_ROWS, interpreting, kernel, on_device, processors, why_not_tensors

WIDTH = 4
"""Taps of the convolution: there are kernels for no other width."""

SEGMENT = 128
"""Tokens of a program, a multiple of 4: many more than the W - 1 that neighbours read twice, few enough for many."""

SHORTEST = 8
"""Tokens of a program in the forward of a short text, which would have too few programs otherwise."""

PROGRAMS = 8
"""With fewer warps per multiprocessor programs get fewer tokens: else they would wait for memory."""

SHORTEST_TEXT = 16
"""Tokens of a plain convolution below which torch is as fast."""

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def _row(x, b, t, low, T, channel, ROW: tl.constexpr):
    """Numbers of one token of ``[B, T, ROW]``; 0 before token `low` and from T on."""
    times = t + tl.zeros_like(channel)
    return tl.load(x + (b * T + t) * ROW + channel, mask=(times >= low) & (times < T), other=0.0)


@triton.jit
def _input(z, state, b, t, low, T, channel, SIZE: tl.constexpr, ROW: tl.constexpr):
    """Inputs of one token, those before the first from the state ``[B, 3, SIZE]``; 0 before `low` and from T on."""
    row = z + (b * T + t) * ROW
    if t < 0:
        row = state + (b * 3 + 3 + t) * SIZE
    times = t + tl.zeros_like(channel)
    return tl.load(row + channel, mask=(times >= low) & (times >= -3) & (times < T), other=0.0)


@triton.jit
def _taps(weight, bias, channel, BIAS: tl.constexpr):
    """The four columns of ``[SIZE, 4]``, and the bias or 0."""
    place = weight + channel * 4
    tap0, tap1 = tl.load(place).to(tl.float32), tl.load(place + 1).to(tl.float32)
    tap2, tap3 = tl.load(place + 2).to(tl.float32), tl.load(place + 3).to(tl.float32)
    offset = tap0
    if BIAS:
        offset = tl.load(bias + channel).to(tl.float32)
    return tap0, tap1, tap2, tap3, offset


@triton.jit
def _sigmoid(c):
    """The sigmoid in four instructions of Hopper. Triton compiles the formula, with denormals, to a dozen.

    Those would be a third of all instructions, and would take as much time as the memory traffic.
    """
    if INTERPRETED:
        gate = 1.0 / (1.0 + tl.exp(-c))
    else:
        # 1 / (1 + 2^(-c log2 e)). A denormal power adds nothing to 1; an infinite one gives 0.
        gate = tl.inline_asm_elementwise(
            "{ .reg .f32 p; mul.ftz.f32 p, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 p, p; add.ftz.f32 p, p, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, p; }",
            "=f,f", [c], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return gate


@triton.jit
def _convolve(x0, x1, x2, x3, taps, BIAS: tl.constexpr):
    """The convolution's output at the token of x3, and its sigmoid."""
    c = x0 * taps[0]
    c += x1 * taps[1]
    c += x2 * taps[2]
    c += x3 * taps[3]
    if BIAS:
        c += taps[4]
    return c, _sigmoid(c)


@triton.jit
def _forward_token(out, b, t, T, x0, x1, x2, x3, taps, channel, eps,
                   SIZE: tl.constexpr, NORMALISE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    c, gate = _convolve(x0, x1, x2, x3, taps, BIAS)
    y = c * gate
    if NORMALISE:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    times = t + tl.zeros_like(channel)
    tl.store(out + (b * T + t) * SIZE + channel, y.to(out.dtype.element_ty), mask=times < T)


@kernel
def _forward_kernel(
    z, weight, bias, state, out, T, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    start, b = tl.program_id(0) * LENGTH, tl.program_id(2).to(tl.int64)
    channel = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None] * D + tl.arange(0, D)[None, :]
    SIZE: tl.constexpr = HEADS * D
    taps = _taps(weight, bias, channel, BIAS)
    low = start - 3
    x0 = _input(z, state, b, start - 3, low, T, channel, SIZE, ROW)
    x1 = _input(z, state, b, start - 2, low, T, channel, SIZE, ROW)
    x2 = _input(z, state, b, start - 1, low, T, channel, SIZE, ROW)
    a0, a1 = _row(z, b, start, start, T, channel, ROW), _row(z, b, start + 1, start, T, channel, ROW)
    a2, a3 = _row(z, b, start + 2, start, T, channel, ROW), _row(z, b, start + 3, start, T, channel, ROW)
    x0, x1, x2 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    for t in range(start, tl.minimum(start + LENGTH, T), 4):
        # The next tokens are loaded before these are computed, so that nothing waits for memory.
        n0, n1 = _row(z, b, t + 4, t, T, channel, ROW), _row(z, b, t + 5, t, T, channel, ROW)
        n2, n3 = _row(z, b, t + 6, t, T, channel, ROW), _row(z, b, t + 7, t, T, channel, ROW)
        _forward_token(out, b, t, T, x0, x1, x2, a0, taps, channel, eps, SIZE, NORMALISE, BIAS)
        _forward_token(out, b, t + 1, T, x1, x2, a0, a1, taps, channel, eps, SIZE, NORMALISE, BIAS)
        _forward_token(out, b, t + 2, T, x2, a0, a1, a2, taps, channel, eps, SIZE, NORMALISE, BIAS)
        _forward_token(out, b, t + 3, T, a0, a1, a2, a3, taps, channel, eps, SIZE, NORMALISE, BIAS)
        x0, x1, x2 = a1, a2, a3
        a0, a1, a2, a3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)


@triton.jit
def _to_convolution(d, x0, x1, x2, x3, taps, eps, NORMALISE: tl.constexpr, BIAS: tl.constexpr):
    """The gradient of the convolution's output at one token, given `d`, that of the result."""
    c, gate = _convolve(x0, x1, x2, x3, taps, BIAS)
    d = d.to(tl.float32)
    if NORMALISE:
        y = c * gate
        inverse = tl.rsqrt(tl.sum(y * y, 1) + eps)
        d = inverse[:, None] * (d - y * (inverse * inverse * tl.sum(d * y, 1))[:, None])
    return d * gate * (1.0 + c * (1.0 - gate))


@triton.jit
def _backward_token(d_z, b, t, T, d, later, x0, x1, x2, x3, taps, sums, channel, eps,
                    SIZE: tl.constexpr, NORMALISE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Store the gradient of one input; `later`: gradients of the convolution's outputs at the next three tokens.

    Returns `later` for the token before, and the sums of the taps' and the bias's gradients.
    """
    d0 = _to_convolution(d, x0, x1, x2, x3, taps, eps, NORMALISE, BIAS)
    to_input = taps[3] * d0 + taps[2] * later[0] + taps[1] * later[1] + taps[0] * later[2]
    times = t + tl.zeros_like(channel)
    tl.store(d_z + (b * T + t) * SIZE + channel, to_input.to(d_z.dtype.element_ty), mask=times < T)
    to_bias = sums[4]
    if BIAS:
        to_bias += d0
    sums = (sums[0] + d0 * x0, sums[1] + d0 * x1, sums[2] + d0 * x2, sums[3] + d0 * x3, to_bias)
    return (d0, later[0], later[1]), sums


@kernel
def _backward_kernel(
    z, weight, bias, state, d_out, d_z, d_state, d_weight, T, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Walk from the last token to the first: an input's gradient depends on the outputs at its token and the next
    three.

    Tokens from T on have a gradient of 0 and change no sum.
    """
    start, b = tl.program_id(0) * LENGTH, tl.program_id(2).to(tl.int64)
    channel = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None] * D + tl.arange(0, D)[None, :]
    SIZE: tl.constexpr = HEADS * D
    taps = _taps(weight, bias, channel, BIAS)
    top, low = start + tl.cdiv(tl.minimum(LENGTH, T - start), 4) * 4, start - 3
    p0, p1 = _row(z, b, top, low, T, channel, ROW), _row(z, b, top + 1, low, T, channel, ROW)
    p2 = _row(z, b, top + 2, low, T, channel, ROW)
    a3, a2 = _row(z, b, top - 1, low, T, channel, ROW), _row(z, b, top - 2, low, T, channel, ROW)
    a1, a0 = _row(z, b, top - 3, low, T, channel, ROW), _row(z, b, top - 4, low, T, channel, ROW)
    b3 = _input(z, state, b, top - 5, low, T, channel, SIZE, ROW)
    b2 = _input(z, state, b, top - 6, low, T, channel, SIZE, ROW)
    b1 = _input(z, state, b, top - 7, low, T, channel, SIZE, ROW)
    b0 = _input(z, state, b, top - 8, low, T, channel, SIZE, ROW)
    e3, e2 = _row(d_out, b, top - 1, start, T, channel, SIZE), _row(d_out, b, top - 2, start, T, channel, SIZE)
    e1, e0 = _row(d_out, b, top - 3, start, T, channel, SIZE), _row(d_out, b, top - 4, start, T, channel, SIZE)
    p0, p1, p2 = p0.to(tl.float32), p1.to(tl.float32), p2.to(tl.float32)
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    b0, b1, b2, b3 = b0.to(tl.float32), b1.to(tl.float32), b2.to(tl.float32), b3.to(tl.float32)
    # Computed even where all are zero: Triton 3.6 loses values that begin as a constant and are then passed from one
    # variable to the next, as these are.
    later = (
        _to_convolution(_row(d_out, b, top, start, T, channel, SIZE), a1, a2, a3, p0, taps, eps, NORMALISE, BIAS),
        _to_convolution(_row(d_out, b, top + 1, start, T, channel, SIZE), a2, a3, p0, p1, taps, eps, NORMALISE, BIAS),
        _to_convolution(_row(d_out, b, top + 2, start, T, channel, SIZE), a3, p0, p1, p2, taps, eps, NORMALISE, BIAS),
    )
    none = tl.zeros([GROUP, D], tl.float32)
    sums = (none, none, none, none, none)
    for step in range((top - start) // 4):
        t = top - 4 - 4 * step
        # The next tokens are loaded before these are computed, so that nothing waits for memory.
        n3 = _input(z, state, b, t - 5, low, T, channel, SIZE, ROW)
        n2 = _input(z, state, b, t - 6, low, T, channel, SIZE, ROW)
        n1 = _input(z, state, b, t - 7, low, T, channel, SIZE, ROW)
        n0 = _input(z, state, b, t - 8, low, T, channel, SIZE, ROW)
        f3, f2 = _row(d_out, b, t - 1, start, T, channel, SIZE), _row(d_out, b, t - 2, start, T, channel, SIZE)
        f1, f0 = _row(d_out, b, t - 3, start, T, channel, SIZE), _row(d_out, b, t - 4, start, T, channel, SIZE)
        later, sums = _backward_token(d_z, b, t + 3, T, e3, later, a0, a1, a2, a3, taps, sums, channel, eps,
                                      SIZE, NORMALISE, BIAS)  # fmt: skip
        later, sums = _backward_token(d_z, b, t + 2, T, e2, later, b3, a0, a1, a2, taps, sums, channel, eps,
                                      SIZE, NORMALISE, BIAS)  # fmt: skip
        later, sums = _backward_token(d_z, b, t + 1, T, e1, later, b2, b3, a0, a1, taps, sums, channel, eps,
                                      SIZE, NORMALISE, BIAS)  # fmt: skip
        later, sums = _backward_token(d_z, b, t, T, e0, later, b1, b2, b3, a0, taps, sums, channel, eps,
                                      SIZE, NORMALISE, BIAS)  # fmt: skip
        a0, a1, a2, a3 = b0, b1, b2, b3
        b0, b1, b2, b3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        e0, e1, e2, e3 = f0, f1, f2, f3
    if start == 0:
        place = d_state + b * 3 * SIZE + channel
        tl.store(place + 2 * SIZE, taps[2] * later[0] + taps[1] * later[1] + taps[0] * later[2])
        tl.store(place + SIZE, taps[1] * later[0] + taps[0] * later[1])
        tl.store(place, taps[0] * later[0])
    COLUMNS: tl.constexpr = 5 if BIAS else 4
    place = d_weight + (b * tl.num_programs(0) + tl.program_id(0)) * COLUMNS * SIZE + channel
    tl.store(place, sums[0])
    tl.store(place + SIZE, sums[1])
    tl.store(place + 2 * SIZE, sums[2])
    tl.store(place + 3 * SIZE, sums[3])
    if BIAS:
        tl.store(place + 4 * SIZE, sums[4])


def convolve_heads(
    z: Tensor, weight: Tensor, state: Tensor | None, *, normalise: bool, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Causal depthwise convolution, SiLU and, where asked for, x / sqrt(sum x^2 + eps) per head.

    The same numbers as `short_convolution` and `layers.norm.l2_normalise`, rounded once, at the end. Gradients reach z,
    the weight, the bias and the state.

    Args:
        z: ``[B, T, H, D]``, D a power of two; its tokens may be parts of wider rows.
        weight: ``[H * D, 4]``, the newest input last.
        state: ``[B, H * D, 3]``, the inputs before z; None = zeros.
        normalise: whether to divide every head by its L2 norm.
        bias: ``[H * D]``, added before SiLU; None = zeros.
        eps: added to the sum of squares; it keeps the result for a head of zeros finite.

    Returns:
        ``[B, T, H, D]`` in the dtype of z.
    """
    state = no_inputs(z, weight) if state is None else laid_out(state.to(z.dtype))
    lies = (z.shape[1] * z.stride(1), z.stride(1), z.shape[3], 1)
    z = z if z.stride() == lies else z.contiguous()
    rest = (weight.contiguous(), state, bias if bias is None else bias.contiguous())
    return cast(Tensor, _ConvolveHeads.apply(normalise, eps, z, *rest))


def no_inputs(z: Tensor, taps: Tensor) -> Tensor:
    """The state of a convolution by taps ``[C, W]`` before the first row of z ``[B, ...]``: zeros, `laid_out`."""
    return z.new_zeros((len(z), taps.shape[1] - 1, len(taps))).transpose(1, 2)


def laid_out(state: Tensor) -> Tensor:
    """A state ``[B, C, W - 1]`` with neighbouring channels side by side in memory; copied if it is not."""
    return state.transpose(1, 2).contiguous().transpose(1, 2)


LEAST = 32
"""The fewest channels of a program: as many as a warp has lanes."""


def why_not(x: Tensor, weight: Tensor, activation: str | None) -> str | None:
    """Why the kernels cannot convolve x ``[B, T, C]`` with a weight ``[C, W]``, in words; None = they can."""
    if activation != "silu":
        return "the kernels have SiLU after the convolution"
    if weight.shape[1] != WIDTH:
        return f"the kernels know convolutions of {WIDTH} taps, not of {weight.shape[1]}"
    if x.shape[2] % LEAST:
        return f"the channels must be a multiple of {LEAST}, not {x.shape[2]}"
    if x.shape[1] < SHORTEST_TEXT:
        return f"fewer than {SHORTEST_TEXT} tokens are left to plain torch"
    if x.shape[0] > MOST_ROWS:
        return f"a batch has at most {MOST_ROWS} rows, not {x.shape[0]}"
    return why_not_tensors(x, weight)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
    """The outputs of `ops.short_convolution` with SiLU, without padding: ``[B, T, C]``."""
    width = next(n for n in (128, 64, LEAST) if x.shape[2] % n == 0)
    return convolve_heads(x.unflatten(-1, (-1, width)), weight, state, normalise=False, bias=bias).flatten(2)


def _group(heads: int, width: int) -> int:
    """Heads of a program: as many as give a warp 128 channels. A warp sums the norm of a head by itself."""
    return next(n for n in (8, 4, 2, 1) if heads % n == 0 and (n == 1 or n * width <= 128))


def _length(z: Tensor) -> int:
    """Tokens of a program in the forward: within bounds, so many that every multiprocessor has `PROGRAMS` warps."""
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
        "ROW": z.stride(1),
        "GROUP": group,
        "LENGTH": tokens,
        "num_warps": max(1, group * width // 128),
    }
    return (triton.cdiv(length, tokens), heads // group, rows), constants


def forward(
    z: Tensor, weight: Tensor, state: Tensor, *, normalise: bool, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """`convolve_heads` without a gradient; the state has the layout of `laid_out`.

    Tokens of z may be parts of wider rows; everything else is contiguous.
    """
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    grid, constants = _launch(z, _length(z))
    with on_device(z):
        _forward_kernel[grid](
            z, weight, weight if bias is None else bias, state, out, z.shape[1], eps,
            NORMALISE=normalise, BIAS=bias is not None, **constants,
        )  # fmt: skip
    return out


def backward(
    z: Tensor,
    weight: Tensor,
    state: Tensor,
    d_out: Tensor,
    d_z: Tensor,
    d_before: Tensor,
    d_weight: Tensor,
    *,
    normalise: bool,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Write the gradients of z and, as ``[B, 3, H * D]``, of the state, given that of `forward`'s result.

    Parts of the gradients of weight and bias go to `d_weight`, ``[parts(z), 4 or 5, H * D]`` in float32.
    """
    grid, constants = _launch(z, SEGMENT)
    with on_device(z):
        _backward_kernel[grid](
            z, weight, weight if bias is None else bias, state, d_out, d_z, d_before, d_weight,
            z.shape[1], eps, NORMALISE=normalise, BIAS=bias is not None, **constants,
        )  # fmt: skip


def parts(z: Tensor) -> int:
    """Number of parts of the weight's gradient that `backward` writes for z ``[B, T, ...]``."""
    return len(z) * int(triton.cdiv(z.shape[1], SEGMENT))


class _ConvolveHeads(torch.autograd.Function):
    """Normalise, eps, z, weight ``[H * D, 4]``, state ``[B, H * D, 3]`` laid out, bias or None -> `convolve_heads`."""

    @staticmethod
    def forward(ctx: Any, normalise: bool, eps: float, *inputs: Any) -> Tensor:
        ctx.normalise, ctx.eps = normalise, eps
        ctx.save_for_backward(*inputs)
        z, weight, state, bias = inputs
        return forward(z, weight, state, normalise=normalise, bias=bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, state, bias = ctx.saved_tensors
        d_z = torch.empty_like(z, memory_format=torch.contiguous_format)
        d_before = state.new_empty((len(state), WIDTH - 1, len(weight)))
        sums = z.new_empty((parts(z), WIDTH + (bias is not None), len(weight)), dtype=torch.float32)
        found = (grads[0].contiguous(), d_z, d_before, sums)
        backward(z, weight, laid_out(state), *found, normalise=ctx.normalise, bias=bias, eps=ctx.eps)
        sums = sums.sum(0)
        d_bias = None if bias is None else sums[WIDTH].to(bias.dtype)
        return None, None, d_z, sums[:WIDTH].t().to(weight.dtype), d_before.transpose(1, 2), d_bias
