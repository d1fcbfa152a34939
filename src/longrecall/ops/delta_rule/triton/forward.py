"""Kernels of the chunked gated delta rule, first half: common functions, and the walk over the chunks.

The mathematics and the letters are those of delta_rule/chunked.py. A program of the walk holds one state ``[K, BV]`` in
registers and reads the keys, values and inverse of a chunk once. Only the results that are asked for are written. State
heads are ordered by key head, then subhead, then value head of that key head.
"""

import triton
import triton.language as tl

from longrecall.ops.kernels.launch import kernel

CHUNK = tl.constexpr(64)


@triton.jit
def dot(a, b, MODE: tl.constexpr):
    """a @ b summed in float32. MODE "bf16" rounds both to bfloat16; "bf16 wide" does too, and multiplies in float32.

    The wide mode is for Triton's interpreter, whose dot of bfloat16 is wrong. Any other MODE is a precision of Triton's
    float32 dot.
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
    """c + a @ b as `dot`. The product is added to the registers of c, so it needs none of its own."""
    if MODE == "bf16":
        c = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), c)
    elif MODE == "bf16 wide":
        c = tl.dot(a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32), c, input_precision="ieee")
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision=MODE)
    return c


@triton.jit
def exact_dot(a, b, MODE: tl.constexpr):
    """a @ b of small float32 blocks with the precision of float32, whatever MODE is."""
    return tl.dot(a, b, input_precision="ieee" if MODE == "bf16 wide" or MODE == "ieee" else "tf32x3")


@triton.jit
def rows_of(
    x, b, start, T, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr
):
    """COUNT rows from `start` on, COLUMNS channels from `first` on, of a head of ``[B, T, HEADS, WIDTH]``; 0 past T."""
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
    """Add to `out` what the queries of one chunk read from the state before it and from the chunk itself.

    e is the number of the subhead within PART; the subheads before it have written to `out` already.
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
    """Walk over a segment for PART subheads of one value head, one after the other, from its first chunk to its last.

    The sequence is one segment or several. `initial` ``[B, HEADS, segments, K, V]`` holds the state before each (see
    segments.py); None = one segment from zeros. Along the third axis of the grid come all parts of the first segment,
    then those of the next.

    READ: outputs are added up in `out` ``[parts, B, T, VALUE_HEADS, V]``, float32 where a part has several subheads,
    and the final states are stored. Otherwise U goes to `corrections` ``[B, HEADS, chunks * C, V]``, and the state
    before every chunk to `states` ``[B, HEADS, chunks, K, V]``.
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
        if initial is None:
            S = tl.zeros([K, BV], tl.float32)
        else:
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
