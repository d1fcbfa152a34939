"""Kernels of the chunked gated delta rule, second half: the gradients.

The letters are those of delta_rule/chunked.py: X and U are what a chunk writes before and after the inverse P, and a
bar marks a gradient. A program of the walk back holds the gradient of one state, as one of the walk forward holds the
state. The other gradients have no order in time: every chunk gets a program of its own.
"""

import triton
import triton.language as tl

from longrecall.ops.delta_rule.triton.forward import CHUNK, decay_between, dot, dot_onto, numbers_of, rows_of, tile
from longrecall.ops.kernels.launch import kernel


@triton.jit
def _chunk_of(x, b, start, T, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, first, COLUMNS: tl.constexpr):
    """`rows_of` a chunk by one pointer and 32-bit offsets, which leaves more registers for a state's gradient."""
    x += (b * T + start) * (HEADS * WIDTH) + head * WIDTH + first
    row = tl.arange(0, CHUNK)[:, None]
    return tl.load(x + row * (HEADS * WIDTH) + tl.arange(0, COLUMNS)[None, :], mask=row < T - start, other=0.0)


@kernel
def walk_back_kernel(
    q, k, beta, weights, cumulative, inverse, d_out, d_final, d_initial, d_states, d_targets,
    scale, T, chunks,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SUBHEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk ``[B, HEADS, chunks, K, V]``, of the first state, and of X.

    `d_out` ``[B, T, VALUE_HEADS, V]``; `d_targets` receives X bar ``[B, HEADS, chunks * C, V]``. `d_final` None =
    zeros, `d_initial` None = not wanted.
    """
    first, state_row = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64)
    b, head = state_row // HEADS, state_row % HEADS
    REPEATS: tl.constexpr = HEADS // KEY_HEADS
    group = head // REPEATS
    value_head = (group // SUBHEADS) * REPEATS + head % REPEATS
    factor = scale * tl.load(weights + value_head * SUBHEADS + group % SUBHEADS).to(tl.float32)
    square, wide, i = tile(CHUNK, CHUNK, CHUNK, 0), tile(K, BV, V, first), tl.arange(0, CHUNK)
    if d_final is None:
        d_S = tl.zeros([K, BV], tl.float32)
    else:
        d_S = tl.load(d_final + state_row * K * V + wide).to(tl.float32)
    for step in range(chunks):
        n = chunks - 1 - step
        start, here = n * CHUNK, state_row * chunks + n
        keys = _chunk_of(k, b, start, T, group, KEY_HEADS, K, 0, K)
        queries = _chunk_of(q, b, start, T, group, KEY_HEADS, K, 0, K)
        d_o = _chunk_of(d_out, b, start, T, value_head, VALUE_HEADS, V, first, BV)
        strength = numbers_of(beta, b, start, T, head, HEADS, CHUNK)
        G = tl.load(cumulative + here * CHUNK + i)
        last = tl.load(cumulative + here * CHUNK + CHUNK - 1)
        P = tl.load(inverse + here * CHUNK * CHUNK + square)
        rounded = d_S.to(d_states.dtype.element_ty)
        tl.store(d_states + here * K * V + wide, rounded)
        # The scores are computed transposed, as the products need them: row j is a key, column i the query that reads
        # it.
        later = i[:, None] <= i[None, :]
        decay = tl.where(later, tl.exp(tl.where(later, G[None, :] - G[:, None], 0.0)) * factor, 0.0)
        scores = dot(keys, tl.trans(queries), MODE) * decay
        # Products add to the sums directly: beside the state, registers hold only one more sum.
        d_U = dot_onto(scores, d_o, dot(keys, rounded, MODE) * tl.exp(last - G)[:, None], MODE)
        d_X = dot(tl.trans(P), d_U, MODE)
        place = d_targets + here * CHUNK * V + tile(CHUNK, BV, V, first)
        tl.store(place, d_X.to(d_targets.dtype.element_ty))
        a = tl.exp(G)[:, None]
        d_S = dot_onto(tl.trans(queries), d_o.to(tl.float32) * (a * factor), d_S * tl.exp(last), MODE)
        d_S = dot_onto(tl.trans(keys), d_X * (-a * strength[:, None]), d_S, MODE)
    if d_initial is not None:
        tl.store(d_initial + state_row * K * V + wide, d_S)


@kernel
def values_kernel(
    v, beta, d_targets, d_values, d_beta, T, chunks,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SUBHEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """For ROWS tokens: the gradient of the values, sum of beta X bar over subheads, and v . X bar, a part of beta's."""
    start, row = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    b, value_head = row // VALUE_HEADS, row % VALUE_HEADS
    REPEATS: tl.constexpr = HEADS // KEY_HEADS
    values = rows_of(v, b, start, T, value_head, VALUE_HEADS, V, 0, ROWS, V).to(tl.float32)
    # d_values may be v itself: all threads must have read before one writes.
    tl.debug_barrier()
    total = tl.zeros([ROWS, V], tl.float32)
    t = start + tl.arange(0, ROWS)
    # The next subheads are loaded while this one is computed, so that nothing waits for memory.
    for sub in tl.range(0, SUBHEADS, num_stages=3):
        head = ((value_head // REPEATS) * SUBHEADS + sub) * REPEATS + value_head % REPEATS
        place = ((b * HEADS + head) * chunks * CHUNK + start) * V + tile(ROWS, V, V, 0)
        d_X = tl.load(d_targets + place).to(tl.float32)
        total += d_X * numbers_of(beta, b, start, T, head, HEADS, ROWS)[:, None]
        tl.store(d_beta + (b * T + t) * HEADS + head, tl.sum(d_X * values, 1), mask=t < T)
    place = (b * T + t)[:, None] * (VALUE_HEADS * V) + value_head * V + tl.arange(0, V)[None, :]
    tl.store(d_values + place, total.to(d_values.dtype.element_ty), mask=(t < T)[:, None])


@triton.jit
def _against_values(d_out, states, corrections, d_states, d_targets, b, start, T, value_head, here, first,
                    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """All sums over value channels: products of O bar and X bar with U, S and S bar; of U with S bar; <S bar, S>."""
    reads, writes = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    read, written = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    kept = tl.zeros([CHUNK, BK], tl.float32)
    product = tl.zeros([BK], tl.float32)
    for block in range(V // BV):
        column = block * BV
        d_o = rows_of(d_out, b, start, T, value_head, VALUE_HEADS, V, column, CHUNK, BV)
        rows = here * CHUNK * V + tile(CHUNK, BV, V, column)
        U, d_X = tl.load(corrections + rows), tl.load(d_targets + rows)
        cells = here * K * V + first * V + tile(BK, BV, V, column)
        S, d_S = tl.load(states + cells), tl.load(d_states + cells)
        reads += dot(d_o, tl.trans(U), MODE)
        writes += dot(d_X, tl.trans(U), MODE)
        read += dot(d_o, tl.trans(S), MODE)
        written += dot(d_X, tl.trans(S), MODE)
        kept += dot(U, tl.trans(d_S), MODE)
        product += tl.sum(S.to(tl.float32) * d_S.to(tl.float32), 1)
    return reads, writes, read, written, kept, tl.sum(product, 0)


@kernel
def keys_kernel(
    q, k, beta, weights, cumulative, d_out, states, corrections, d_states, d_targets,
    d_queries, d_keys, d_beta, d_decay, d_weights, scale, T, chunks,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SUBHEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Gradients of BK channels of q and k ``[B, T, HEADS, K]`` in one chunk, and what these add to the gates'
    gradients.

    `d_queries` and `d_keys` may be q and k: no other program reads these channels. `d_beta` and `d_decay` are float32
    ``[K / BK, B, T, HEADS]``, `d_weights` ``[K / BK, B, HEADS, chunks]``.
    """
    # Chunks and blocks share the first axis: the other axes are too short for the chunks of some long texts.
    BLOCKS: tl.constexpr = K // BK
    block, n, state_row = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    b, head, first, start = state_row // HEADS, state_row % HEADS, block * BK, n * CHUNK
    REPEATS: tl.constexpr = HEADS // KEY_HEADS
    group = head // REPEATS
    value_head = (group // SUBHEADS) * REPEATS + head % REPEATS
    weight = tl.load(weights + value_head * SUBHEADS + group % SUBHEADS).to(tl.float32)
    here, i = state_row * chunks + n, tl.arange(0, CHUNK)
    reads, writes, read, written, kept, product = _against_values(
        d_out, states, corrections, d_states, d_targets, b, start, T, value_head, here, first,
        VALUE_HEADS, K, V, BK, BV, MODE)  # fmt: skip
    G = tl.load(cumulative + here * CHUNK + i)
    last = tl.load(cumulative + here * CHUNK + CHUNK - 1)
    strength = numbers_of(beta, b, start, T, head, HEADS, CHUNK)
    a, w = tl.exp(G)[:, None], tl.exp(last - G)[:, None]
    reads *= decay_between(G, G, i[:, None] >= i[None, :]) * scale
    writes *= -decay_between(G, G, i[:, None] > i[None, :])
    keys = _chunk_of(k, b, start, T, group, KEY_HEADS, K, first, BK)
    queries = _chunk_of(q, b, start, T, group, KEY_HEADS, K, first, BK)
    t = start + i
    corner = (b * T + start) * (HEADS * K) + head * K + first
    place = i[:, None] * (HEADS * K) + tl.arange(0, BK)[None, :]
    # The gradients may overwrite q and k: every warp must have read its part before one writes.
    tl.debug_barrier()
    # A finished result is stored before the next sum begins: five of them fill the registers.
    d_q = dot_onto(reads, keys, read * (a * scale), MODE)
    by_read = tl.sum(d_q * queries.to(tl.float32), 1)
    tl.store(d_queries + corner + place, (d_q * weight).to(d_queries.dtype.element_ty), mask=(t < T)[:, None])
    d_written = dot_onto(writes, keys, written * -a, MODE)
    by_written = tl.sum(d_written * keys.to(tl.float32), 1)
    kept *= w
    after = tl.sum(kept * keys.to(tl.float32))
    # The weight is not rounded with the scores. So what a token reads of itself cancels in the decay's gradient.
    d_k = dot(tl.trans(reads), queries, MODE) * weight + kept
    d_k = dot_onto(tl.trans(writes * strength[:, None]), keys, d_k, MODE)
    d_G = strength * by_written + weight * by_read - tl.sum(d_k * keys.to(tl.float32), 1)
    d_G += tl.where(i == CHUNK - 1, tl.exp(last) * product + after, 0.0)
    # G is a cumulative sum of the log decays: its gradient is summed from the end of the chunk.
    d_g = tl.sum(tl.where(i[:, None] >= i[None, :], d_G[:, None], 0.0), 0)
    numbers = ((block * (tl.num_programs(1) // HEADS) + b) * T + t) * HEADS + head
    tl.store(d_beta + numbers, by_written, mask=t < T)
    tl.store(d_decay + numbers, d_g, mask=t < T)
    tl.store(d_weights + (block * tl.num_programs(1) + state_row) * chunks + n, tl.sum(by_read, 0))
    d_k += strength[:, None] * d_written
    tl.store(d_keys + corner + place, d_k.to(d_keys.dtype.element_ty), mask=(t < T)[:, None])
