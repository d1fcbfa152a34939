"""Kernels of the chunked gated delta rule, first half: the triangular inverse, and the walk over the chunks.

The mathematics and the letters are those of ops/chunked_delta.py. A program of the walk owns one state ``[K, BV]`` in
registers and reads a chunk's keys, values and inverse once, so that nothing of the length of the sequence is written
except what is asked for. State heads are numbered key head, subhead, value head of that key head.
"""

import triton
import triton.language as tl

from longrecall.ops.triton.launch import kernel

CHUNK = tl.constexpr(64)


@triton.jit
def dot(a, b, MODE: tl.constexpr):
    """a @ b summed in float32. MODE "bf16" rounds both to bfloat16; "bf16 wide" also, and multiplies in float32.

    Triton's interpreter computes nonsense from a dot of bfloat16: there the wide mode stands in. Otherwise MODE is a
    precision of Triton's float32 dot.
    """
    if MODE == "bf16":
        c = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif MODE == "bf16 wide":
        c = tl.dot(a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=MODE)
    return c


@triton.jit
def dot_onto(a, b, c, MODE: tl.constexpr):
    """c + a @ b as `dot`, added up where c lies: no second set of registers holds the product."""
    if MODE == "bf16":
        c = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), c)
    elif MODE == "bf16 wide":
        c = tl.dot(a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32), c, input_precision="ieee")
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision=MODE)
    return c


@triton.jit
def exact_dot(a, b, MODE: tl.constexpr):
    """a @ b of small float32 blocks, at float32's precision also where MODE is a lower one."""
    return tl.dot(a, b, input_precision="ieee" if MODE == "bf16 wide" or MODE == "ieee" else "tf32x3")


@triton.jit
def rows_of(
    x, b, start, T, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr
):
    """COUNT rows from `start` on of one head of ``[B, T, HEADS, WIDTH]``, its COLUMNS from `first` on; 0 past T."""
    t = start + tl.arange(0, COUNT)
    columns = first + tl.arange(0, COLUMNS)
    place = (b * T + t)[:, None] * (HEADS * WIDTH) + head * WIDTH + columns[None, :]
    return tl.load(x + place, mask=t[:, None] < T, other=0.0)


@triton.jit
def numbers_of(x, b, start, T, head, HEADS: tl.constexpr, COUNT: tl.constexpr):
    """COUNT numbers from `start` on of one head of ``[B, T, HEADS]``, in float32; 0 past T."""
    t = start + tl.arange(0, COUNT)
    return tl.load(x + (b * T + t) * HEADS + head, mask=t < T, other=0.0).to(tl.float32)


@triton.jit
def tile(rows: tl.constexpr, columns: tl.constexpr, width, first):
    """Offsets of a ``[rows, columns]`` tile in a matrix of that width, from column `first` on."""
    return tl.arange(0, rows)[:, None] * width + first + tl.arange(0, columns)[None, :]


@triton.jit
def decay_between(G_rows, G_columns, keep):
    """e^(G_i - G_j) where `keep`, 0 elsewhere; the exponent is never positive."""
    return tl.where(keep, tl.exp(tl.where(keep, G_rows[:, None] - G_columns[None, :], 0.0)), 0.0)


@triton.jit
def _products(k, b, start, T, group, KEY_HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr):
    """k_i k_j^T of a chunk's four blocks of 16 keys, i >= j."""
    p00 = tl.zeros([16, 16], tl.float32)
    p10, p11, p20, p21, p22, p30, p31, p32, p33 = p00, p00, p00, p00, p00, p00, p00, p00, p00
    for column in range(0, K, BK):
        k0 = rows_of(k, b, start, T, group, KEY_HEADS, K, column, 16, BK)
        k1 = rows_of(k, b, start + 16, T, group, KEY_HEADS, K, column, 16, BK)
        k2 = rows_of(k, b, start + 32, T, group, KEY_HEADS, K, column, 16, BK)
        k3 = rows_of(k, b, start + 48, T, group, KEY_HEADS, K, column, 16, BK)
        t0, t1, t2, t3 = tl.trans(k0), tl.trans(k1), tl.trans(k2), tl.trans(k3)
        p00 += dot(k0, t0, MODE)
        p10 += dot(k1, t0, MODE)
        p11 += dot(k1, t1, MODE)
        p20 += dot(k2, t0, MODE)
        p21 += dot(k2, t1, MODE)
        p22 += dot(k2, t2, MODE)
        p30 += dot(k3, t0, MODE)
        p31 += dot(k3, t1, MODE)
        p32 += dot(k3, t2, MODE)
        p33 += dot(k3, t3, MODE)
    return p00, p10, p11, p20, p21, p22, p30, p31, p32, p33


@triton.jit
def _block(products, beta_i, G_i, G_j):
    """A 16 x 16 block of L away from the diagonal."""
    return products * beta_i[:, None] * tl.exp(G_i[:, None] - G_j[None, :])


@triton.jit
def _diagonal_block(products, beta_i, G_i):
    """A 16 x 16 block of L on the diagonal, transposed: what is kept lies above."""
    i = tl.arange(0, 16)
    above = i[:, None] < i[None, :]
    decay = tl.where(above, tl.exp(tl.where(above, G_i[None, :] - G_i[:, None], 0.0)), 0.0)
    return products * beta_i[None, :] * decay


@triton.jit
def _substitute(inverse, transposed, i):
    """Row i of (I + L)^-1 from the rows before it, given the transposed L."""
    index = tl.arange(0, 16)
    row = tl.sum(tl.where(index[None, :] == i, transposed, 0.0), axis=1)
    step = tl.sum(row[:, None] * inverse, axis=0)
    return tl.where(index[:, None] == i, inverse - step[None, :], inverse)


@kernel
def invert_kernel(
    k, log_decay, beta, inverse, cumulative, T, strongest,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """P = (I + L)^-1 of one chunk by forward substitution on 16 x 16 blocks, and the cumulative log decay G."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head, start, chunks = row // HEADS, row % HEADS, n * CHUNK, tl.num_programs(0)
    index = tl.arange(0, CHUNK)
    G = tl.cumsum(tl.maximum(numbers_of(log_decay, b, start, T, head, HEADS, CHUNK), strongest), 0)
    here = row * chunks + n
    tl.store(cumulative + here * CHUNK + index, G)
    tl.debug_barrier()
    i = tl.arange(0, 16)
    g = cumulative + here * CHUNK + i
    G0, G1, G2, G3 = tl.load(g), tl.load(g + 16), tl.load(g + 32), tl.load(g + 48)
    group = head // (HEADS // KEY_HEADS)
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = _products(k, b, start, T, group, KEY_HEADS, K, BK, MODE)
    beta0 = numbers_of(beta, b, start, T, head, HEADS, 16)
    beta1 = numbers_of(beta, b, start + 16, T, head, HEADS, 16)
    beta2 = numbers_of(beta, b, start + 32, T, head, HEADS, 16)
    beta3 = numbers_of(beta, b, start + 48, T, head, HEADS, 16)
    L00, L11 = _diagonal_block(p00, beta0, G0), _diagonal_block(p11, beta1, G1)
    L22, L33 = _diagonal_block(p22, beta2, G2), _diagonal_block(p33, beta3, G3)
    P00 = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    P11, P22, P33 = P00, P00, P00
    for r in range(1, 16):
        P00, P11 = _substitute(P00, L00, r), _substitute(P11, L11, r)
        P22, P33 = _substitute(P22, L22, r), _substitute(P33, L33, r)
    L10, L21, L32 = _block(p10, beta1, G1, G0), _block(p21, beta2, G2, G1), _block(p32, beta3, G3, G2)
    L20, L31, L30 = _block(p20, beta2, G2, G0), _block(p31, beta3, G3, G1), _block(p30, beta3, G3, G0)
    P10 = -exact_dot(P11, exact_dot(L10, P00, MODE), MODE)
    P21 = -exact_dot(P22, exact_dot(L21, P11, MODE), MODE)
    P32 = -exact_dot(P33, exact_dot(L32, P22, MODE), MODE)
    P20 = -exact_dot(P22, exact_dot(L20, P00, MODE) + exact_dot(L21, P10, MODE), MODE)
    P31 = -exact_dot(P33, exact_dot(L31, P11, MODE) + exact_dot(L32, P21, MODE), MODE)
    rest = exact_dot(L30, P00, MODE) + exact_dot(L31, P10, MODE) + exact_dot(L32, P20, MODE)
    P30 = -exact_dot(P33, rest, MODE)
    out = inverse + here * CHUNK * CHUNK
    _store_blocks(out, P00, P10, P20, P30, P11, P21, P31, P22, P32, P33)


@triton.jit
def _store_blocks(out, P00, P10, P20, P30, P11, P21, P31, P22, P32, P33):
    """The ten blocks of a lower triangular 64 x 64 matrix, and zeros above them."""
    place = tile(16, 16, CHUNK, 0)
    kind = out.dtype.element_ty
    none = tl.zeros([16, 16], kind)
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1, 4):
            tl.store(out + i * 16 * CHUNK + j * 16 + place, none)
    tl.store(out + place, P00.to(kind))
    tl.store(out + 16 * CHUNK + place, P10.to(kind))
    tl.store(out + 32 * CHUNK + place, P20.to(kind))
    tl.store(out + 48 * CHUNK + place, P30.to(kind))
    tl.store(out + 16 * CHUNK + 16 + place, P11.to(kind))
    tl.store(out + 32 * CHUNK + 16 + place, P21.to(kind))
    tl.store(out + 48 * CHUNK + 16 + place, P31.to(kind))
    tl.store(out + 32 * CHUNK + 32 + place, P22.to(kind))
    tl.store(out + 48 * CHUNK + 32 + place, P32.to(kind))
    tl.store(out + 48 * CHUNK + 48 + place, P33.to(kind))


@triton.jit
def corrections_of(keys, values, strength, G, P, S, MODE: tl.constexpr):
    """U of a chunk from the state S before it."""
    return dot(P, strength[:, None] * (values - tl.exp(G)[:, None] * dot(keys, S, MODE)), MODE)


@triton.jit
def carried(keys, U, G, last, S, MODE: tl.constexpr):
    """The state after a chunk."""
    return S * tl.exp(last) + dot(tl.trans(keys), U * tl.exp(last - G)[:, None], MODE)


@triton.jit
def _read(q, k, S, U, out, weight, scale, b, start, T, group, part_row, value_head, first, G, e, PART: tl.constexpr,
          KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
          MODE: tl.constexpr):  # fmt: skip
    """What the queries of one chunk read from the state before it and from the chunk itself, added to `out`.

    This is subhead e of PART: those before it have written there.
    """
    i = tl.arange(0, CHUNK)
    queries = rows_of(q, b, start, T, group, KEY_HEADS, K, 0, CHUNK, K)
    scores = dot(queries, tl.trans(k), MODE) * decay_between(G, G, i[:, None] >= i[None, :])
    o = dot_onto(scores, U, dot(queries, S, MODE) * tl.exp(G)[:, None], MODE) * (scale * weight)
    inside = (i < T - start)[:, None]
    out += (part_row * T + start) * (VALUE_HEADS * V) + value_head * V + first
    place = out + i[:, None] * (VALUE_HEADS * V) + tl.arange(0, BV)[None, :]
    if PART > 1:
        o += tl.load(place, mask=inside & (e > 0), other=0.0)
    tl.store(place, o.to(out.dtype.element_ty), mask=inside)


@kernel
def walk_kernel(
    q, k, v, beta, weights, cumulative, inverse, initial, out, final, states, corrections,
    scale, T, chunks, B,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SUBHEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    PART: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """PART subheads of one value head one after the other, each from the first chunk of a segment to its last.

    The sequence is one segment, or several that know the state before them: `initial` ``[B, HEADS, segments, K, V]``,
    see delta_split.py. Programs of the third axis are the parts of one segment after the other.

    READ: their outputs are added up in `out` ``[parts, B, T, VALUE_HEADS, V]``, float32 where there are several, and
    the final states stored.
    Otherwise U goes to `corrections` ``[B, HEADS, chunks * C, V]`` and the state before every chunk to `states`
    ``[B, HEADS, chunks, K, V]``.
    """
    PARTS: tl.constexpr = SUBHEADS // PART
    first, row, part = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64), tl.program_id(2) % PARTS
    segment, segments = tl.program_id(2) // PARTS, tl.num_programs(2) // PARTS
    per = (chunks + segments - 1) // segments
    b, value_head = row // VALUE_HEADS, row % VALUE_HEADS
    REPEATS: tl.constexpr = HEADS // KEY_HEADS
    square, wide = tile(CHUNK, CHUNK, CHUNK, 0), tile(K, BV, V, first)
    for e in range(PART):
        sub = part * PART + e
        group = (value_head // REPEATS) * SUBHEADS + sub
        head = group * REPEATS + value_head % REPEATS
        state_row = b * HEADS + head
        weight = tl.load(weights + value_head * SUBHEADS + sub).to(tl.float32)
        S = tl.load(initial + (state_row * segments + segment) * K * V + wide).to(tl.float32)
        for n in range(segment * per, tl.minimum((segment + 1) * per, chunks)):
            start, here = n * CHUNK, state_row * chunks + n
            keys = rows_of(k, b, start, T, group, KEY_HEADS, K, 0, CHUNK, K)
            values = rows_of(v, b, start, T, value_head, VALUE_HEADS, V, first, CHUNK, BV).to(tl.float32)
            strength = numbers_of(beta, b, start, T, head, HEADS, CHUNK)
            G = tl.load(cumulative + here * CHUNK + tl.arange(0, CHUNK))
            last = tl.load(cumulative + here * CHUNK + CHUNK - 1)
            P = tl.load(inverse + here * CHUNK * CHUNK + square)
            U = corrections_of(keys, values, strength, G, P, S, MODE)
            if READ:
                _read(q, keys, S, U, out, weight, scale, b, start, T, group, part * B + b, value_head, first, G, e,
                      PART, KEY_HEADS, VALUE_HEADS, K, V, BV, MODE)  # fmt: skip
            else:
                tl.store(states + here * K * V + wide, S.to(states.dtype.element_ty))
                place = corrections + here * CHUNK * V + tile(CHUNK, BV, V, first)
                tl.store(place, U.to(corrections.dtype.element_ty))
            S = carried(keys, U, G, last, S, MODE)
        if READ:
            ends_here = tl.arange(0, K) < tl.where(segment == segments - 1, K, 0)
            tl.store(final + state_row * K * V + wide, S, mask=ends_here[:, None])
