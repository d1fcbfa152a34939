"""The backward of head-wise expansion, short convolution, SiLU and L2 norm, up to the gradient of the expansion.

A program has one subhead, whose weight ``[D, D]`` stays in shared memory. It walks from the last tokens of its streams
to the first, computes the inputs of the convolution again, and writes their gradients. The product of a tile and the
work after it follow each other. Two programs fit a multiprocessor, so that one multiplies while the other does the
rest. The caller computes the gradients of y and of the weight by two products with the gradients that are written here.

All formulas are those of the short convolution with other scales. Taps are multiplied by -log2 e, so gradients of the
convolution's output are multiplied by -ln 2. The norms are those that the forward kept.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longrecall.ops.expansion.hopper.streams import (
    LN2,
    LOG2E,
    convolve,
    fetch,
    form,
    narrow,
    norm_places,
    operands,
    rows,
    scaled_taps,
    sigmoid,
    streams,
    summing,
    token,
)
from longrecall.ops.kernels.gluon import gluon_kernel


def _products() -> str:
    """PTX: a lane's parts of the sums of two tokens -> both sums over the warp."""
    lines = [".reg .b32 a<2>, s, k, t, r, lane;", ".reg .pred p;", "mov.b32 a0, $2;", "mov.b32 a1, $3;"]
    lines += [*summing(2), *(f"shfl.sync.idx.b32 ${i}, a0, {16 * i}, 31, -1;" for i in range(2))]
    return "{ " + " ".join(lines) + " }"


PRODUCTS = gl.constexpr(_products())


@gluon.jit
def _silu(x0, x1, x2, x3, taps):
    """SiLU of the convolution at the token of x3, times -log2 e, and its sigmoid."""
    c = convolve(x0, x1, x2, x3, taps)
    s = sigmoid(c)
    return c * s, s


@gluon.jit
def _slope(d, y, s, inverse, product, NORMALISE: gl.constexpr):
    """-ln 2 times the gradient of the convolution's output, given the gradient d of the result.

    `y` and `s` are what `_silu` returned, `inverse` is -1 / |y|, `product` is <d, y>.
    """
    silu = (s * LN2 - LN2) * y + s
    if NORMALISE:
        d = (d - y * gl.expand_dims(product * (inverse * inverse), 2)) * gl.expand_dims(inverse, 2)
    else:
        d *= -LN2
    return d * silu


@gluon.jit
def _two(d0, d1, x0, x1, x2, x3, x4, taps, inverse, NORMALISE: gl.constexpr):
    """-ln 2 times the gradients of the convolution's outputs at two tokens, whose own inputs are x3 and x4."""
    y0, s0 = _silu(x0, x1, x2, x3, taps)
    y1, s1 = _silu(x1, x2, x3, x4, taps)
    p0, p1 = inverse
    if NORMALISE:
        p0, p1 = gl.inline_asm_elementwise(
            PRODUCTS, "=&f,=&f,f,f", [gl.sum(d0 * y0, 2), gl.sum(d1 * y1, 2)],
            dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return _slope(d0, y0, s0, inverse[0], p0, NORMALISE), _slope(d1, y1, s1, inverse[1], p1, NORMALISE)


@gluon.jit
def _inverse(norms, n: gl.constexpr, left, SUBHEADS: gl.constexpr, NORMALISE: gl.constexpr):
    """The -1 / norm that the forward kept of tokens n and n + 1; 0 past the end of the text."""
    if NORMALISE:
        i0, i1 = _one(norms, n, left, SUBHEADS), _one(norms, n + 1, left, SUBHEADS)
    else:
        i0, i1 = 0.0, 0.0
    return i0, i1


@gluon.jit
def _one(norms, n: gl.constexpr, left, SUBHEADS: gl.constexpr):
    return gl.load(norms + n * SUBHEADS, mask=n < left, other=0.0)


@gluon.jit
def _to_input(a, b, c, d, taps, A: gl.constexpr, D: gl.constexpr):
    """The gradient of an input, ``[8, D]``, from those of the convolution's outputs at its token and the next three."""
    return narrow((a * taps[3] + b * taps[2] + c * taps[1] + d * taps[0]).to(gl.bfloat16), A, D)


@gluon.jit
def _pair(
    z, d, there, n: gl.constexpr, left, window, later, inverse, taps, sums,
    SIZE: gl.constexpr, D: gl.constexpr, NORMALISE: gl.constexpr, A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Write the gradients of the convolution's inputs at tokens n and n + 1 of a tile.

    `z` holds the inputs, beginning three tokens before the tile. `window` holds inputs n - 1 .. n + 1. `later` holds
    the gradients of the convolution's outputs at the next three tokens. `left` is the number of tokens from the first
    of the tile to the end of the text. Returns the next `window` and `later`, and `sums`.
    """
    x2, x3, x4 = window
    x0, x1 = token(z, n, A, P), token(z, n + 1, A, P)
    e0, e1 = _two(token(d, n, A, P), token(d, n + 1, A, P), x0, x1, x2, x3, x4, taps, inverse, NORMALISE)
    gl.store(there + (n + 1) * SIZE, _to_input(e1, later[0], later[1], later[2], taps, A, D),
             mask=(n + 1 < left)[:, None])  # fmt: skip
    gl.store(there + n * SIZE, _to_input(e0, e1, later[0], later[1], taps, A, D), mask=(n < left)[:, None])
    sums = (
        sums[0] + e0 * x0 + e1 * x1, sums[1] + e0 * x1 + e1 * x2,
        sums[2] + e0 * x2 + e1 * x3, sums[3] + e0 * x3 + e1 * x4,
    )  # fmt: skip
    return (x0, x1, x2), (e0, e1, later[0]), sums


@gluon.jit
def _begin(z, state, begins, SIZE: gl.constexpr, A: gl.constexpr):
    """Write the state ``[3, SIZE]`` over the three inputs before the beginning of a text."""
    for n in gl.static_range(3):
        inputs = z.slice(8 * n, 8, 0)
        inputs.store(gl.where(begins, gl.load(state + n * SIZE, mask=begins, other=0.0), inputs.load(A)))


@gluon.jit
def _above(
    z, d, norms, left, length, taps, SUBHEADS: gl.constexpr, NORMALISE: gl.constexpr, A: gl.constexpr, P: gl.constexpr
):
    """The first `window` and `later`, from the first tokens after the streams, each of which has `length` tokens."""
    there, rest = norms + length.to(gl.int64) * SUBHEADS, left - length
    x0, x1, x2 = token(z, 0, A, P), token(z, 1, A, P), token(z, 2, A, P)
    x3, x4, x5 = token(z, 3, A, P), token(z, 4, A, P), token(z, 5, A, P)
    d0, d1, d2 = token(d, 0, A, P), token(d, 1, A, P), token(d, 2, A, P)
    lower, upper = _inverse(there, 0, rest, SUBHEADS, NORMALISE), _inverse(there, 2, rest, SUBHEADS, NORMALISE)
    e0, e1 = _two(d0, d1, x0, x1, x2, x3, x4, taps, lower, NORMALISE)
    e2 = _two(d2, d2, x2, x3, x4, x5, x5, taps, upper, NORMALISE)[0]
    return (x0, x1, x2), (e0, e1, e2)


@gluon.jit
def _leave(d_state, d_taps, later, sums, taps, begins, SIZE: gl.constexpr, A: gl.constexpr, P: gl.constexpr):
    """Write the gradients of the three inputs before the text, ``[3, SIZE]``, and of the taps, ``[4, SIZE]``."""
    D: gl.constexpr = begins.shape[1]
    zero = gl.zeros([8, 32, D // 32], gl.float32, P)
    gl.store(d_state + 2 * SIZE, _to_input(zero, later[0], later[1], later[2], taps, A, D), mask=begins)
    gl.store(d_state + SIZE, _to_input(zero, zero, later[0], later[1], taps, A, D), mask=begins)
    gl.store(d_state, _to_input(zero, zero, zero, later[0], taps, A, D), mask=begins)
    for n in gl.static_range(4):
        gl.store(d_taps + n * SIZE, narrow(sums[n] * -LOG2E, A, D))


@gluon_kernel
def backward_kernel(
    y, grafted, weight, taps, state, norms, d_out, d_z, d_state, d_taps, B, T, segments, chunks,
    HEADS: gl.constexpr, E: gl.constexpr, D: gl.constexpr, GRAFTED: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """Grid: subheads, groups of 8 streams. `norms` is ``[B, T, H * E]``, `d_taps` is ``[streams, 4, SIZE]``."""
    SIZE: gl.constexpr = HEADS * E * D
    SUBHEADS: gl.constexpr = HEADS * E
    A: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [8, 1], [1, 0])
    P: gl.constexpr = gl.BlockedLayout([1, 1, D // 32], [1, 32, 1], [8, 1, 1], [2, 1, 0])
    Q: gl.constexpr = gl.SliceLayout(2, P)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    Z: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, D // 2, 16])
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.bfloat16)
    sub, length = gl.program_id(0), 8 * chunks
    source, w = operands(y, grafted, weight, L, HEADS, E, D, GRAFTED)
    y_tile = gl.allocate_shared_memory(gl.bfloat16, [64, D], S)
    z_tile = gl.allocate_shared_memory(gl.bfloat16, [64, D], S)
    d_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], S)

    texts, t = rows(B, T, segments, chunks, D)
    d_heads = d_out + sub * D
    stream = gl.arange(0, 8, layout=gl.SliceLayout(1, A))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, A))[None, :] + sub * D
    b, start, alive = streams(stream, B, T, segments, chunks)
    there = d_z + (b * T + start)[:, None] * SIZE + channel
    left = gl.where(alive, T - start, 0)
    begins = (alive & (start == 0))[:, None] & (channel >= 0)
    before_text = b[:, None] * (3 * SIZE) + channel
    k = scaled_taps(taps, channel + gl.zeros_like(start)[:, None], P)
    norms = norm_places(norms, B, T, segments, chunks, SUBHEADS, P)

    # The tokens after the last tile: gradients in it depend on them. Tiles of inputs begin 3 tokens earlier.
    fetch(d_tiles.index(1), d_heads, texts, t, length, T, SIZE)
    fetch(y_tile, source, texts, t, length - 3, T, HEADS * D)
    form(y_tile, w, z_tile, Z, D)
    fetch(y_tile, source, texts, t, length - 11, T, HEADS * D)
    fetch(d_tiles.index(0), d_heads, texts, t, length - 8, T, SIZE)
    rest = gl.convert_layout(left, gl.SliceLayout(1, Q), assert_trivial=True)[:, None]
    window, later = _above(z_tile, d_tiles.index(1), norms, rest, length, k, SUBHEADS, NORMALISE, A, P)
    zero = gl.zeros([8, 32, D // 32], gl.float32, P)
    sums = (zero, zero, zero, zero)
    for i in range(chunks):
        ahead = length - 8 - 8 * i
        norm = norms + ahead.to(gl.int64) * SUBHEADS
        n6 = _inverse(norm, 6, rest - ahead, SUBHEADS, NORMALISE)
        form(y_tile, w, z_tile, Z, D)
        fetch(y_tile, source, texts, t, ahead - 11, T, HEADS * D)
        fetch(d_tiles.index((i + 1) % 2), d_heads, texts, t, ahead - 8, T, SIZE)
        if i == chunks - 1:
            _begin(z_tile, state + before_text, begins, SIZE, A)
        d, place = d_tiles.index(i % 2), there + ahead.to(gl.int64) * SIZE
        n4 = _inverse(norm, 4, rest - ahead, SUBHEADS, NORMALISE)
        window, later, sums = _pair(z_tile, d, place, 6, left - ahead, window, later, n6, k, sums,
                                    SIZE, D, NORMALISE, A, P)  # fmt: skip
        n2 = _inverse(norm, 2, rest - ahead, SUBHEADS, NORMALISE)
        window, later, sums = _pair(z_tile, d, place, 4, left - ahead, window, later, n4, k, sums,
                                    SIZE, D, NORMALISE, A, P)  # fmt: skip
        n0 = _inverse(norm, 0, rest - ahead, SUBHEADS, NORMALISE)
        window, later, sums = _pair(z_tile, d, place, 2, left - ahead, window, later, n2, k, sums,
                                    SIZE, D, NORMALISE, A, P)  # fmt: skip
        window, later, sums = _pair(z_tile, d, place, 0, left - ahead, window, later, n0, k, sums,
                                    SIZE, D, NORMALISE, A, P)  # fmt: skip
    async_copy.wait_group(0)
    place = d_taps + (gl.program_id(1) * 8 + stream).to(gl.int64)[:, None] * (4 * SIZE) + channel
    _leave(d_state + before_text, place, later, sums, k, begins, SIZE, A, P)
