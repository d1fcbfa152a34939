"""What the kernels of head-wise expansion share: tiles of 8 streams, and functions on tokens in registers.

A program has one subhead and walks along 8 parts of the text, its streams, 8 tokens of each at a time. The 64 rows of a
tile are ordered by token; the rows of one token are the 8 streams. Each warp has a stream, and each of its lanes D / 32
channels. So the token before is another variable of the same thread, and the norm of a token is a sum over one warp.

Taps are multiplied by -log2 e, so that the result of the convolution is the exponent of the power of two in the
sigmoid. Before rounding, SiLU has a relative error of about 2^-20, also far below zero. There Hopper's tanh (one
instruction with an error of 2^-11) would give errors of several percent.
"""

from __future__ import annotations

import functools

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from longrecall.ops.kernels.gluon import async_load, barrier
from longrecall.ops.kernels.launch import processors

STREAMS = 8
"""Streams of a program, and its warps."""

TOKENS = 8
"""Tokens of a stream in a tile."""

BEGINNING = 4
"""The start of a program takes as long as this many tiles."""

SHORTEST = 8
"""The fewest tiles of a stream: rows are not cut into shorter segments."""

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


def plan(x: Tensor, subheads: int, each: int) -> tuple[int, int]:
    """Segments of a row of x ``[B, T, ...]`` and tiles of a segment, chosen so that the launch takes least time.

    `each` programs fit a multiprocessor. A subhead has a program for every 8 segments of all rows.
    """
    return _plan(*x.shape[:2], subheads, each * processors(x))


@functools.lru_cache(maxsize=1024)
def _plan(rows: int, tokens: int, subheads: int, room: int) -> tuple[int, int]:
    """As `plan`; `room`: programs that run at the same time. Results are remembered, as every launch asks."""
    tiles = triton.cdiv(tokens, TOKENS)

    def work(segments: int) -> int:
        programs = triton.cdiv(rows * segments, STREAMS) * subheads
        return int(triton.cdiv(programs, room) * (triton.cdiv(tiles, segments) + BEGINNING))

    most = min(triton.cdiv(tiles, SHORTEST), triton.cdiv(2 * STREAMS * room, max(1, rows * subheads)))
    chunks = triton.cdiv(tiles, min(range(1, most + 1), key=work))
    return triton.cdiv(tiles, chunks), chunks


def summing(values: int) -> list[str]:
    """PTX that adds up registers a0, a1, ... over a warp; their number is a power of two, at most 8.

    Lanes that differ in bit 4 of their number exchange half of the values and keep the other half; then lanes that
    differ in bit 3 do so, and so on. So several values take hardly more exchanges than one. The sum of value i ends in
    a0 of lane 32 / values * i.
    """
    lines, mask, left = ["mov.u32 lane, %laneid;"], 16, values
    while left > 1:
        left //= 2
        lines += [f"and.b32 t, lane, {mask};", "setp.ne.u32 p, t, 0;"]
        for i in range(left):
            lines += [
                f"selp.b32 s, a{i}, a{i + left}, p;",
                f"selp.b32 k, a{i + left}, a{i}, p;",
                f"shfl.sync.bfly.b32 r, s, {mask}, 31, -1;",
                f"add.f32 a{i}, k, r;",
            ]
        mask //= 2
    while mask:
        lines += [f"shfl.sync.bfly.b32 r, a0, {mask}, 31, -1;", "add.f32 a0, a0, r;"]
        mask //= 2
    return lines


@gluon.jit
def sigmoid(c):
    """1 / (1 + 2^c), the sigmoid of -c ln 2, with a relative error of 2^-21; 0 from c = 128 on, 1 at -infinity."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 p; ex2.approx.ftz.f32 p, $1; add.f32 p, p, 0f3F800000; rcp.approx.ftz.f32 $0, p; }",
        "=f,f", [c], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def sigmoids(c):
    """As `sigmoid`, for two neighbouring channels by one reciprocal; the results are never below about 2^-62.

    1 / a and 1 / b are computed as b and a times 1 / (a b). Values of c above 62 count as 62. So a b is less than
    2^125, and both it and its reciprocal are normal numbers. SiLU has a relative error of about 2^-20 for inputs down
    to -42; below that its error is at most 2^-62 times its input. A NaN stays in its channel, as PTX's minimum of NaN
    and a number is the number.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 a, b, p; min.f32 a, $2, 0f42780000; min.f32 b, $3, 0f42780000; ex2.approx.ftz.f32 a, a;"
        " ex2.approx.ftz.f32 b, b; add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000; mul.f32 p, a, b;"
        " rcp.approx.ftz.f32 p, p; mul.f32 $0, p, b; mul.f32 $1, p, a; }",
        "=f,=f,f,f", [c], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def convolve(x0, x1, x2, x3, taps):
    """The convolution at the token of x3, times -log2 e."""
    c = x0 * taps[0]
    c += x1 * taps[1]
    c += x2 * taps[2]
    return c + x3 * taps[3]


@gluon.jit
def wide(x, P: gl.constexpr):
    """``[8, D]`` -> float32 ``[8, 32, D / 32]``, a lane's channels last."""
    return gl.convert_layout(gl.reshape(x.to(gl.float32), [8, 32, x.shape[1] // 32]), P, assert_trivial=True)


@gluon.jit
def narrow(x, A: gl.constexpr, D: gl.constexpr):
    """The inverse of `wide`, without rounding."""
    return gl.convert_layout(gl.reshape(x, [8, D]), A, assert_trivial=True)


@gluon.jit
def token(tile, n: gl.constexpr, A: gl.constexpr, P: gl.constexpr):
    """Token n of every stream of a tile of bfloat16 in shared memory."""
    # One instruction per number; Triton's own conversion takes three for two numbers.
    x = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [tile.slice(8 * n, 8, 0).load(A)],
        dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
    return wide(x, P)


@gluon.jit
def streams(s, B, T, segments, chunks):
    """For streams s of this program: row of the batch, first token, and whether the stream exists."""
    stream = gl.program_id(1) * 8 + s
    b = stream // segments
    start = (stream - b * segments) * (chunks * 8)
    return gl.minimum(b, B - 1).to(gl.int64), start, (b < B) & (start < T)


@gluon.jit
def rows(B, T, segments, chunks, D: gl.constexpr):
    """Where texts begin in ``[B * T]``, and tokens, of the rows of a program's first tile that are copied at once.

    Where a stream does not exist, the token lies beyond the end of every text.
    """
    C: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // D, D // 8], [1, 8, 1], [2, 1, 0])
    row = gl.arange(0, 2048 // D, layout=gl.SliceLayout(0, gl.SliceLayout(2, C)))
    b, start, live = streams(row & 7, B, T, segments, chunks)
    return b * T, gl.where(live, start + (row >> 3), 1 << 30)


@gluon.jit
def fetch(into, x, texts, t, ahead, T, ROW: gl.constexpr):
    """Start copying a tile of x ``[B, T, ROW]``, `ahead` tokens after those of `rows`; zeros outside of the text."""
    ROWS: gl.constexpr = t.shape[0]
    D: gl.constexpr = into.shape[1]
    C: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // D, D // 8], [1, 8, 1], [2, 1, 0])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    # The rows of a thread lie at constant distances, so one address serves all of them.
    later = gl.arange(0, 64 // ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, C)))[:, None] * (ROWS // 8)
    there = (t + ahead)[None, :] + later
    row = gl.reshape((texts + (t + ahead))[None, :] + later.to(gl.int64), [64])
    row = gl.convert_layout(row, gl.SliceLayout(1, L), assert_trivial=True)
    # As unsigned numbers: then one comparison also excludes tokens before the text.
    inside = gl.reshape(there.to(gl.uint32) < T.to(gl.uint32), [64])
    inside = gl.convert_layout(inside, gl.SliceLayout(1, L), assert_trivial=True)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    async_load(into, x + row[:, None] * ROW + column, mask=inside[:, None])
    async_copy.commit_group()


@gluon.jit
def form(y_tile, w, z_tile, Z: gl.constexpr, D: gl.constexpr):
    """y W in bfloat16 for the last tile of `fetch`. After it z is in shared memory, and y may be overwritten."""
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    none = gl.zeros([64, D], gl.float32, Z)
    z_tile.store(warpgroup_mma(y_tile, w, none, use_acc=False).to(gl.bfloat16))
    barrier()


@gluon.jit
def norm_places(norms, B, T, segments, chunks, SUBHEADS: gl.constexpr, P: gl.constexpr):
    """Addresses of the first token of every stream of this program in norms ``[B, T, SUBHEADS]``, for all lanes."""
    Q: gl.constexpr = gl.SliceLayout(2, P)
    b, start, _ = streams(gl.arange(0, 8, layout=gl.SliceLayout(1, Q)), B, T, segments, chunks)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, Q))[None, :]
    return norms + (b * T + start)[:, None] * SUBHEADS + gl.program_id(0) + lane * 0


@gluon.jit
def before(state, n: gl.constexpr, found, begins, SIZE: gl.constexpr, P: gl.constexpr):
    """The input of token n - 3 of every stream: from the state ``[3, SIZE]`` where the text begins, else `found`."""
    x = wide(gl.load(state + n * SIZE, mask=begins, other=0.0), P)
    return gl.where(wide(begins, P) > 0, x, found)


@gluon.jit
def scaled_taps(taps, channel, P: gl.constexpr):
    """The four columns of ``[SIZE, 4]`` times -log2 e, for channels ``[8, D]``."""
    place = taps + channel * 4
    tap0, tap1 = wide(gl.load(place), P) * -LOG2E, wide(gl.load(place + 1), P) * -LOG2E
    tap2, tap3 = wide(gl.load(place + 2), P) * -LOG2E, wide(gl.load(place + 3), P) * -LOG2E
    return tap0, tap1, tap2, tap3


@gluon.jit
def operands(
    y, grafted, weight, L: gl.constexpr, HEADS: gl.constexpr, E: gl.constexpr, D: gl.constexpr, GRAFTED: gl.constexpr
):
    """The operands of the product: heads, and a weight ``[D, D]`` in shared memory; a grafted head has the identity."""
    MADE: gl.constexpr = E - GRAFTED
    head, e = gl.program_id(0) // E, gl.program_id(0) % E
    row = gl.arange(0, D, layout=gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    source, part = y, e
    if GRAFTED:
        part = gl.maximum(e - 1, 0)
        if e == 0:
            source = grafted
    w = gl.load(weight + head.to(gl.int64) * (D * MADE * D) + row * (MADE * D) + part * D + column)
    if GRAFTED:
        w = gl.where((e == 0) & (row == column), 1.0, gl.where(e == 0, 0.0, w.to(gl.float32))).to(w.dtype)
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D], gl.bfloat16)
    return source + head * D, gl.allocate_shared_memory(gl.bfloat16, [D, D], S, w)
