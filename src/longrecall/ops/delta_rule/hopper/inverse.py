"""The triangular inverse of the delta rule on Hopper: a warp per chunk, whose lanes substitute independently."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from longrecall.ops.kernels.gluon import async_load, barrier, gluon_kernel, reinterpret

CHUNK = gl.constexpr(64)
BLOCK = gl.constexpr(16)
LOG2E = gl.constexpr(1.4426950408889634)
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, MMA.value))
LANES = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
PAIRS = gl.constexpr(gl.BlockedLayout([2, 1], [2, 16], [1, 1], [1, 0]))


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _load_keys(keys, k, b, start, T, group, KEY_HEADS: gl.constexpr, K: gl.constexpr):
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [1, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, COPY))
    column = gl.arange(0, K, gl.SliceLayout(0, COPY))
    k += (b * T + start) * (KEY_HEADS * K) + group * K
    place = k + row[:, None] * (KEY_HEADS * K) + column[None, :]
    mask = (row < T - start)[:, None] & (column >= 0)[None, :]
    async_load(keys, place, mask)
    async_copy.commit_group()


@gluon.jit
def _products(keys, K: gl.constexpr):
    """k_j k_i^T of a chunk's four blocks of 16 keys, j <= i: (00, 01, 02, 03, 11, 12, 13, 22, 23, 33)."""
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, MMA)
    p00, p01, p02, p03, p11, p12, p13, p22, p23, p33 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for c in gl.static_range(K // 64):
        part = keys.slice(c * 64, 64, 1)
        a0 = part.slice(0, BLOCK).load(LEFT)
        a1 = part.slice(16, BLOCK).load(LEFT)
        a2 = part.slice(32, BLOCK).load(LEFT)
        a3 = part.slice(48, BLOCK).load(LEFT)
        b0 = gl.convert_layout(a0.permute((1, 0)), RIGHT, assert_trivial=True)
        b1 = gl.convert_layout(a1.permute((1, 0)), RIGHT, assert_trivial=True)
        b2 = gl.convert_layout(a2.permute((1, 0)), RIGHT, assert_trivial=True)
        b3 = gl.convert_layout(a3.permute((1, 0)), RIGHT, assert_trivial=True)
        p00, p01, p02, p03 = mma_v2(a0, b0, p00), mma_v2(a0, b1, p01), mma_v2(a0, b2, p02), mma_v2(a0, b3, p03)
        p11, p12, p13 = mma_v2(a1, b1, p11), mma_v2(a1, b2, p12), mma_v2(a1, b3, p13)
        p22, p23, p33 = mma_v2(a2, b2, p22), mma_v2(a2, b3, p23), mma_v2(a3, b3, p33)
    return p00, p01, p02, p03, p11, p12, p13, p22, p23, p33


@gluon.jit
def _diagonal(p, G, strength, i: gl.constexpr):
    rows, columns = G.slice(i * BLOCK, BLOCK).load(ROWS), G.slice(i * BLOCK, BLOCK).load(COLUMNS)
    s = strength.slice(i * BLOCK, BLOCK).load(ROWS)
    return p * s[:, None] * gl.exp2((rows[:, None] - columns[None, :]) * LOG2E)


@gluon.jit
def _right(p, G, strength, j: gl.constexpr, i: gl.constexpr):
    """-L for rows of block i and columns of block j < i, from k_j k_i^T, as two bfloat16: a product's right operand."""
    anchor = G.slice(i * BLOCK, 1)
    before = gl.exp2((anchor.load(ROWS) - G.slice(j * BLOCK, BLOCK).load(ROWS)) * LOG2E)
    after = gl.exp2((G.slice(i * BLOCK, BLOCK).load(COLUMNS) - anchor.load(COLUMNS)) * LOG2E)
    after *= strength.slice(i * BLOCK, BLOCK).load(COLUMNS)
    p *= before[:, None] * after[None, :]
    high, low = _halves(p)
    return (
        gl.convert_layout(high.permute((1, 0)), RIGHT, assert_trivial=True),
        gl.convert_layout(low.permute((1, 0)), RIGHT, assert_trivial=True),
    )


@gluon.jit
def _halves(x):
    """x as the sum of two bfloat16. It converts two numbers at a time; the plain formula would convert one by one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b;
        .reg .b32 u, v;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 u, $0, 16;
        and.b32 v, $0, 0xffff0000;
        mov.b32 a, u;
        mov.b32 b, v;
        sub.f32 a, $2, a;
        sub.f32 b, $3, b;
        cvt.rn.bf16x2.f32 $1, b, a;
        }""",
        "=&r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _left(x):
    high, low = _halves(x)
    return gl.convert_layout(high, LEFT, assert_trivial=True), gl.convert_layout(low, LEFT, assert_trivial=True)


@gluon.jit
def _onto(a, b, c):
    """c + a @ b for pairs of bfloat16, without the product of the two low halves."""
    c = mma_v2(a[1], b[0], c)
    c = mma_v2(a[0], b[1], c)
    return mma_v2(a[0], b[0], c)


@gluon.jit
def _product(a, b):
    return _onto(a, b, gl.zeros([BLOCK, BLOCK], gl.float32, MMA))


@gluon.jit
def _substitute(lower):
    """Rows ``[4, 16]`` of (I + L)^-1 of four blocks from -L `[256, 4]`: a lane computes a column of two blocks."""
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, PAIRS))[None, :]
    block = gl.arange(0, 4, gl.SliceLayout(1, PAIRS))[:, None]
    rows = (gl.where(column + 0 * block == 0, 1.0, 0.0),)
    for i in gl.static_range(1, 16):
        row = gl.where(column + 0 * block == i, 1.0, 0.0)
        for j in gl.static_range(i):
            row += lower.index(i * 16 + j).load(gl.SliceLayout(1, PAIRS))[:, None] * rows[j]
        rows += (row,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _joined(x, HALF: gl.constexpr):
    """The tensors in pairs, first half with second half, each pair joined along a new last axis."""
    y = (gl.join(x[0], x[HALF]),)
    for r in gl.static_range(1, HALF):
        y += (gl.join(x[r], x[r + HALF]),)  # type: ignore[assignment]
    return y


@gluon.jit
def _woven(x):
    """Sixteen rows ``[4, 16]`` as one tensor ``[4, 16 columns, 16 rows]``."""
    return _joined(_joined(_joined(_joined(x, 8), 4), 2), 1)[0].reshape([4, BLOCK, BLOCK])


@gluon.jit
def _assemble(square, highs, lows, L10, L20, L30, L21, L31, L32):
    """Write all blocks of P to `square`, from the transposed inverses on the diagonal and -L of the blocks below it."""
    none = gl.zeros([BLOCK, BLOCK], gl.bfloat16, MMA)
    for r in gl.static_range(4):
        for c in gl.static_range(r + 1, 4):
            _block(square, r, c).store(none)
        _block(square, r, r).store(highs.index(r).permute((1, 0)).load(MMA))
    D0, D1, D2 = _from(highs, lows, 0, RIGHT), _from(highs, lows, 1, RIGHT), _from(highs, lows, 2, RIGHT)
    D3 = _from(highs, lows, 3, LEFT)
    P32 = _product(_left(_product(D3, L32)), D2)
    P32 = _left(P32)
    _block(square, 3, 2).store(P32[0])
    P31 = _product(_left(_onto(P32, L21, _product(D3, L31))), D1)
    P31 = _left(P31)
    _block(square, 3, 1).store(P31[0])
    P30 = _product(_left(_onto(P31, L10, _onto(P32, L20, _product(D3, L30)))), D0)
    _block(square, 3, 0).store(P30.to(gl.bfloat16))
    E2 = _from(highs, lows, 2, LEFT)
    P21 = _product(_left(_product(E2, L21)), D1)
    P21 = _left(P21)
    _block(square, 2, 1).store(P21[0])
    P20 = _product(_left(_onto(P21, L10, _product(E2, L20))), D0)
    _block(square, 2, 0).store(P20.to(gl.bfloat16))
    P10 = _product(_left(_product(_from(highs, lows, 1, LEFT), L10)), D0)
    _block(square, 1, 0).store(P10.to(gl.bfloat16))


@gluon_kernel
def invert_kernel(
    k, log_decay, beta, inverse, cumulative, T, strongest,
    KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """P of one chunk of one head, bfloat16, and its cumulative log decay, float32: `invert_kernel` of
    triton/inverse.py.

    One warp. k ``[B, T, KEY_HEADS, K]`` bfloat16; log_decay and beta ``[B, T, HEADS]`` float32; grid
    ``(chunks * HEADS, B)``: neighbouring programs read neighbouring heads.
    """
    place, b = gl.program_id(0), gl.program_id(1).to(gl.int64)
    n, head = place // HEADS, place % HEADS
    chunks = gl.num_programs(0) // HEADS
    start, here = n * CHUNK, (b * HEADS + head) * chunks + n
    keys = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], SWIZZLED)
    _load_keys(keys, k, b, start, T, head // (HEADS // KEY_HEADS), KEY_HEADS, K)

    i = gl.arange(0, CHUNK, LANES)
    inside = i < T - start
    numbers = (b * T + start) * HEADS + head + i * HEADS
    strength = gl.load(beta + numbers, mask=inside, other=0.0).to(gl.float32)
    decay = gl.load(log_decay + numbers, mask=inside, other=0.0).to(gl.float32)
    G = gl.associative_scan(gl.maximum(decay, strongest), 0, _sum)
    gl.store(cumulative + here * CHUNK + i, G)
    Gs = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT, G)
    strengths = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT, -strength)

    async_copy.wait_group(0)
    barrier()
    p00, p01, p02, p03, p11, p12, p13, p22, p23, p33 = _products(keys, K)
    L0, L1 = _diagonal(p00, Gs, strengths, 0), _diagonal(p11, Gs, strengths, 1)
    L2, L3 = _diagonal(p22, Gs, strengths, 2), _diagonal(p33, Gs, strengths, 3)
    lower = gl.allocate_shared_memory(gl.float32, [BLOCK * BLOCK, 4], FLAT)
    reinterpret(lower, gl.float32, [BLOCK, BLOCK, 4], CUBE).store(
        gl.join(gl.join(L0, L2), gl.join(L1, L3)).reshape([BLOCK, BLOCK, 4])
    )
    barrier()
    L10, L20, L30 = _right(p01, Gs, strengths, 0, 1), _right(p02, Gs, strengths, 0, 2), _right(p03, Gs, strengths, 0, 3)
    L21, L31, L32 = _right(p12, Gs, strengths, 1, 2), _right(p13, Gs, strengths, 1, 3), _right(p23, Gs, strengths, 2, 3)
    high, low = _halves(_woven(_substitute(lower)))
    highs = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK, BLOCK], PLAIN)
    lows = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK, BLOCK], PLAIN)
    reinterpret(highs, gl.bfloat16, [4, BLOCK, BLOCK], CUBE).store(high)
    reinterpret(lows, gl.bfloat16, [4, BLOCK, BLOCK], CUBE).store(low)
    barrier()

    square = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SWIZZLED)
    _assemble(square, highs, lows, L10, L20, L30, L21, L31, L32)
    barrier()
    r, c = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE)), gl.arange(0, CHUNK, gl.SliceLayout(0, WIDE))
    gl.store(inverse + here * CHUNK * CHUNK + r[:, None] * CHUNK + c[None, :], square.load(WIDE))


@gluon.jit
def _block(square, r: gl.constexpr, c: gl.constexpr):
    return square.slice(r * BLOCK, BLOCK, 0).slice(c * BLOCK, BLOCK, 1)


@gluon.jit
def _from(highs, lows, i: gl.constexpr, LAYOUT: gl.constexpr):
    return highs.index(i).permute((1, 0)).load(LAYOUT), lows.index(i).permute((1, 0)).load(LAYOUT)
