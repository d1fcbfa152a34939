"""The kernel of expansion.py: the product, short convolution, SiLU and L2 norm in one launch.

A tile of the product y W has tokens as rows, and the convolution of a row needs the three rows before it. No value has
to move between lanes for that. A program walks along several parts of the text, its streams, side by side. The rows of
a tile are 8 consecutive tokens of every stream. The tile is split into 8 pieces ``[streams, D]``, one for each of the 8
tokens. All pieces have the same layout, so the token before is another variable of the same thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrecall.ops.kernels.launch import interpreting, kernel

TOKENS = tl.constexpr(8)
"""Tokens of a stream that are computed at a time."""

INTERPRETED = tl.constexpr(interpreting())

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _gate(c):
    """1 / (1 + 2^c), the sigmoid of -c ln 2, in three instructions of Hopper (see `_sigmoid` in convolution/triton)."""
    if INTERPRETED:
        gate = 1.0 / (1.0 + tl.exp2(c))
    else:
        gate = tl.inline_asm_elementwise(
            "{ .reg .f32 p; ex2.approx.ftz.f32 p, $1; add.ftz.f32 p, p, 0f3F800000; rcp.approx.ftz.f32 $0, p; }",
            "=f,f", [c], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return gate


@triton.jit
def _scaled_taps(taps, channel):
    """The four columns of ``[SIZE, 4]`` times -log2 e, so that the convolution gives the argument of `_gate`."""
    place = taps + channel * 4
    tap0, tap1 = tl.load(place).to(tl.float32), tl.load(place + 1).to(tl.float32)
    tap2, tap3 = tl.load(place + 2).to(tl.float32), tl.load(place + 3).to(tl.float32)
    return (tap0 * -LOG2E)[None, :], (tap1 * -LOG2E)[None, :], (tap2 * -LOG2E)[None, :], (tap3 * -LOG2E)[None, :]


@triton.jit
def _operands(
    y, weight, grafted, rows, head, e, channel,
    HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, GRAFTED: tl.constexpr,
):  # fmt: skip
    """Where the rows of the product lie, and its weight ``[D, D]``; for a grafted head they are y and the identity."""
    MADE: tl.constexpr = E - GRAFTED
    row = tl.arange(0, D)[:, None]
    source, part = y, e
    if GRAFTED:
        part = tl.maximum(e - 1, 0)
        if e == 0:
            source = grafted
    w = tl.load(weight + head.to(tl.int64) * (D * MADE * D) + row * (MADE * D) + part * D + channel)
    if GRAFTED:
        w = tl.where((e == 0) & (row == channel), 1.0, tl.where(e == 0, 0.0, w)).to(w.dtype)
    return source + rows * (HEADS * D) + head * D, w


@triton.jit
def _expanded(
    source, w, i, first, T,
    GROUPS: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs of 8 tokens of every stream, as 8 tensors ``[GROUPS, D]``; zeros outside of the text.

    `i` ``[GROUPS * 8]`` are the numbers of the tokens, stream after stream, counted from `first`.
    """
    inside = (first + i >= 0) & (first + i < T)
    y = tl.load(source + i[:, None] * ROW + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0)
    y, w = y.to(DOT), w.to(DOT)
    if UPCAST:
        y, w = y.to(tl.float32), w.to(tl.float32)
    # Rounded, as it would be if it were stored.
    x = tl.dot(y, w, input_precision=PRECISION).to(source.dtype.element_ty)
    low, high = tl.split(tl.permute(tl.reshape(x, [GROUPS, 2, 2, 2, D]), [0, 4, 3, 2, 1]))
    low_low, low_high = tl.split(low)
    high_low, high_high = tl.split(high)
    x0, x1 = tl.split(low_low)
    x2, x3 = tl.split(low_high)
    x4, x5 = tl.split(high_low)
    x6, x7 = tl.split(high_high)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _before(found, state, n: tl.constexpr, start, channel, SIZE: tl.constexpr):
    """The input of token n - 3 of every stream: from the state ``[3, SIZE]`` where the text begins, else `found`."""
    begins = (start == 0)[:, None]
    return tl.where(begins, tl.load(state + n * SIZE + channel + 0 * start[:, None], mask=begins, other=0.0), found)


@triton.jit
def _convolve(x0, x1, x2, x3, taps):
    """-log2 e times the convolution at the token of x3, and the sigmoid of the convolution."""
    c = x0.to(tl.float32) * taps[0]
    c += x1.to(tl.float32) * taps[1]
    c += x2.to(tl.float32) * taps[2]
    c += x3.to(tl.float32) * taps[3]
    return c, _gate(c)


@triton.jit
def _begin(
    y, weight, grafted, taps, state, T, chunks,
    HEADS: tl.constexpr, E: tl.constexpr, D: tl.constexpr, GRAFTED: tl.constexpr, GROUPS: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a program reads, and where its streams begin.

    The subheads of a head read the same rows, so their programs are neighbours. Returns the operands of the product,
    the taps and the first token of the program; counted from that token, the first tokens of its streams ``[GROUPS]``
    and the tokens of a tile's rows ``[GROUPS * 8]``; and the three inputs before each stream, which come from the state
    at the beginning of the text.
    """
    SIZE: tl.constexpr = HEADS * E * D
    sub, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * (GROUPS * TOKENS * chunks)
    channel = tl.arange(0, D)[None, :]
    source, w = _operands(y, weight, grafted, b * T + first, sub // E, sub % E, channel, HEADS, D, E, GRAFTED)
    k = _scaled_taps(taps, sub * D + tl.arange(0, D))
    start = tl.arange(0, GROUPS) * (TOKENS * chunks)
    row = tl.arange(0, GROUPS * TOKENS)
    row = row // TOKENS * (TOKENS * chunks) + row % TOKENS
    x = _expanded(source, w, row - TOKENS, first, T, GROUPS, D, HEADS * D, DOT, UPCAST, PRECISION)
    state += b * 3 * SIZE + sub * D
    u = (
        _before(x[5], state, 0, first + start, channel, SIZE),
        _before(x[6], state, 1, first + start, channel, SIZE),
        _before(x[7], state, 2, first + start, channel, SIZE),
    )
    return source, w, k, first, start, row, u


@triton.jit
def _forward_token(there, n: tl.constexpr, i, left, x0, x1, x2, x3, taps, eps,
                   SIZE: tl.constexpr, NORMALISE: tl.constexpr):  # fmt: skip
    c, gate = _convolve(x0, x1, x2, x3, taps)
    z = c * gate
    if NORMALISE:
        # The norm divides the scale of z out again, so eps is scaled alike.
        z *= -tl.rsqrt(tl.sum(z * z, 1) + eps * (LOG2E * LOG2E))[:, None]
    else:
        z *= -LN2
    tl.store(there + n * SIZE, z.to(there.dtype.element_ty), mask=(i + n < left)[:, None])


@kernel
def forward_kernel(
    y, weight, grafted, taps, state, out, T, chunks, eps,
    HEADS: tl.constexpr, E: tl.constexpr, D: tl.constexpr, GRAFTED: tl.constexpr, NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: subheads, parts of the text, rows of the batch."""
    SIZE: tl.constexpr = HEADS * E * D
    source, w, k, first, start, row, u = _begin(
        y, weight, grafted, taps, state, T, chunks, HEADS, E, D, GRAFTED, GROUPS, DOT, UPCAST, PRECISION
    )
    u0, u1, u2 = u
    left = T - first
    out += (tl.program_id(2).to(tl.int64) * T + first) * SIZE + tl.program_id(0) * D + tl.arange(0, D)[None, :]
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        i = start + chunk * TOKENS
        x = _expanded(source, w, row + chunk * TOKENS, first, T, GROUPS, D, HEADS * D, DOT, UPCAST, PRECISION)
        there = out + i[:, None] * SIZE
        _forward_token(there, 0, i, left, u0, u1, u2, x[0], k, eps, SIZE, NORMALISE)
        _forward_token(there, 1, i, left, u1, u2, x[0], x[1], k, eps, SIZE, NORMALISE)
        _forward_token(there, 2, i, left, u2, x[0], x[1], x[2], k, eps, SIZE, NORMALISE)
        _forward_token(there, 3, i, left, x[0], x[1], x[2], x[3], k, eps, SIZE, NORMALISE)
        _forward_token(there, 4, i, left, x[1], x[2], x[3], x[4], k, eps, SIZE, NORMALISE)
        _forward_token(there, 5, i, left, x[2], x[3], x[4], x[5], k, eps, SIZE, NORMALISE)
        _forward_token(there, 6, i, left, x[3], x[4], x[5], x[6], k, eps, SIZE, NORMALISE)
        _forward_token(there, 7, i, left, x[4], x[5], x[6], x[7], k, eps, SIZE, NORMALISE)
        u0, u1, u2 = x[5], x[6], x[7]
