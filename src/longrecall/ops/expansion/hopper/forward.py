"""Head-wise expansion, short convolution, SiLU and L2 norm in one launch.

A program has one subhead, whose weight ``[D, D]`` stays in shared memory. It walks along its streams from their first
tokens on. The product of a tile and the work after it follow each other, while the next tile is loaded. Several
programs fit a multiprocessor, so that some multiply while others do the rest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longrecall.ops.expansion.hopper.streams import (
    LN2,
    LOG2E,
    before,
    convolve,
    fetch,
    form,
    narrow,
    norm_places,
    operands,
    rows,
    scaled_taps,
    sigmoids,
    streams,
    summing,
    token,
)
from longrecall.ops.kernels.gluon import gluon_kernel


def _norms() -> str:
    """PTX: a lane's parts of the sums of squares of four tokens, and eps -> -1 / norm of each and of the lane's token.

    Quarter i of the warp has token i.
    """
    lines = [".reg .b32 a<4>, s, k, t, r, lane;", ".reg .pred p;"]
    lines += [f"mov.b32 a{i}, ${5 + i};" for i in range(4)]
    lines += [*summing(4), "add.f32 s, a0, $9;", "rsqrt.approx.ftz.f32 s, s;", "sub.f32 s, 0f00000000, s;"]
    lines += [*(f"shfl.sync.idx.b32 ${i}, s, {8 * i}, 31, -1;" for i in range(4)), "mov.b32 $4, s;"]
    return "{ " + " ".join(lines) + " }"


NORMS = gl.constexpr(_norms())
REGISTERS = gl.constexpr(",".join(["=&f"] * 5 + ["f"] * 5))


@gluon.jit
def _silu(x0, x1, x2, x3, taps):
    """SiLU of the convolution at the token of x3, times -log2 e."""
    c = convolve(x0, x1, x2, x3, taps)
    # One reciprocal for two channels. In the backward it would cost more registers than it gains.
    return c * sigmoids(c)


@gluon.jit
def _half(
    z, there, norms, n: gl.constexpr, left, window, taps, eps, SIZE: gl.constexpr, D: gl.constexpr,
    NORMALISE: gl.constexpr, KEEP: gl.constexpr, A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Tokens n .. n + 3 of a tile; `window` holds the three inputs before them. Returns the next `window`."""
    Q: gl.constexpr = gl.SliceLayout(2, P)
    x0, x1, x2 = window
    x3, x4, x5, x6 = token(z, n, A, P), token(z, n + 1, A, P), token(z, n + 2, A, P), token(z, n + 3, A, P)
    y0, y1 = _silu(x0, x1, x2, x3, taps), _silu(x1, x2, x3, x4, taps)
    y2, y3 = _silu(x2, x3, x4, x5, taps), _silu(x3, x4, x5, x6, taps)
    if NORMALISE:
        n0, n1, n2, n3 = gl.sum(y0 * y0, 2), gl.sum(y1 * y1, 2), gl.sum(y2 * y2, 2), gl.sum(y3 * y3, 2)
        # The sums are of squares of numbers times log2 e, so eps is scaled alike.
        small = gl.full_like(n0, 0.0) + eps * (LOG2E * LOG2E)
        n0, n1, n2, n3, own = gl.inline_asm_elementwise(
            NORMS, REGISTERS, [n0, n1, n2, n3, small],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        if KEEP:
            rest = gl.convert_layout(left, gl.SliceLayout(1, Q), assert_trivial=True)[:, None]
            own_token = n + (gl.arange(0, 32, layout=gl.SliceLayout(0, Q))[None, :] >> 3)
            gl.store(norms + n * (SIZE // D), own, mask=own_token < rest)
        y0, y1, y2, y3 = y0 * n0[:, :, None], y1 * n1[:, :, None], y2 * n2[:, :, None], y3 * n3[:, :, None]
    else:
        y0, y1, y2, y3 = y0 * -LN2, y1 * -LN2, y2 * -LN2, y3 * -LN2
    gl.store(there + n * SIZE, narrow(y0.to(gl.bfloat16), A, D), mask=(n < left)[:, None])
    gl.store(there + (n + 1) * SIZE, narrow(y1.to(gl.bfloat16), A, D), mask=(n + 1 < left)[:, None])
    gl.store(there + (n + 2) * SIZE, narrow(y2.to(gl.bfloat16), A, D), mask=(n + 2 < left)[:, None])
    gl.store(there + (n + 3) * SIZE, narrow(y3.to(gl.bfloat16), A, D), mask=(n + 3 < left)[:, None])
    return x4, x5, x6


@gluon_kernel
def forward_kernel(
    y, grafted, weight, taps, state, out, norms, B, T, segments, chunks, eps,
    HEADS: gl.constexpr, E: gl.constexpr, D: gl.constexpr, GRAFTED: gl.constexpr, NORMALISE: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    """Grid: subheads, groups of 8 streams. KEEP: the results of `_norms` are stored in norms ``[B, T, H * E]``."""
    SIZE: gl.constexpr = HEADS * E * D
    BF: gl.constexpr = gl.bfloat16
    A: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [8, 1], [1, 0])
    P: gl.constexpr = gl.BlockedLayout([1, 1, D // 32], [1, 32, 1], [8, 1, 1], [2, 1, 0])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    Z: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, D // 2, 16])
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], BF)
    source, w = operands(y, grafted, weight, L, HEADS, E, D, GRAFTED)
    y_tile = gl.allocate_shared_memory(BF, [64, D], S)
    z_tile = gl.allocate_shared_memory(BF, [64, D], S)

    texts, t = rows(B, T, segments, chunks, D)
    stream = gl.arange(0, 8, layout=gl.SliceLayout(1, A))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, A))[None, :] + gl.program_id(0) * D
    b, start, alive = streams(stream, B, T, segments, chunks)
    there = out + (b * T + start)[:, None] * SIZE + channel
    left = gl.where(alive, T - start, 0)
    begins = (alive & (start == 0))[:, None] & (channel >= 0)
    k = scaled_taps(taps, channel + gl.zeros_like(start)[:, None], P)
    norms = norm_places(norms, B, T, segments, chunks, SIZE // D, P)
    norms += (gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, P)))[None, :] >> 3) * (SIZE // D)

    # Before the first tile: the three inputs that its first tokens need.
    first = chunks * 0
    fetch(y_tile, source, texts, t, first - 8, T, HEADS * D)
    form(y_tile, w, z_tile, Z, D)
    fetch(y_tile, source, texts, t, first, T, HEADS * D)
    state += b[:, None] * (3 * SIZE) + channel
    window = (
        before(state, 0, token(z_tile, 5, A, P), begins, SIZE, P),
        before(state, 1, token(z_tile, 6, A, P), begins, SIZE, P),
        before(state, 2, token(z_tile, 7, A, P), begins, SIZE, P),
    )
    for i in range(chunks):
        ahead = first + 8 * i
        form(y_tile, w, z_tile, Z, D)
        fetch(y_tile, source, texts, t, ahead + 8, T, HEADS * D)
        place, norm = there + ahead.to(gl.int64) * SIZE, norms + ahead.to(gl.int64) * (SIZE // D)
        window = _half(z_tile, place, norm, 0, left - ahead, window, k, eps, SIZE, D, NORMALISE, KEEP, A, P)
        window = _half(z_tile, place, norm, 4, left - ahead, window, k, eps, SIZE, D, NORMALISE, KEEP, A, P)
    async_copy.wait_group(0)
