"""Forward kernels of chunked gated linear attention; chunked.py says what they compute together.

Shapes: q, k ``[B, T, Hk, K]``; v, o ``[B, T, Hv, V]``; cumulative decays G ``[B, N * C, W]`` in float32 with W = Hk * K
(MODE 2, per channel) or the number of decaying heads (MODE 1), N chunks of C tokens; scores ``[B, N * C, Hk, C]``.
With a decay per channel, states are multiplied with decayed queries q e^G and keys k e^(G_C - G), ``[B, N * C, Hk, K]``
in the dtype of the products, computed once. Else they are multiplied with q and k, and decays scale products or values.
A state pairs a key head with a value head: value head h with key head h // R, or (MERGED) each with every other.
Rows past T are read as zeros and log decays there as 0, so the last chunk is no special case.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrecall.ops.kernels.launch import kernel, product


@triton.jit
def pair_heads(p, Hv, R, MERGED: tl.constexpr):
    """Key head, value head and decaying head of state p."""
    if MERGED:
        hk, hv, dh = p // Hv, p % Hv, p // Hv
    else:
        hk, hv, dh = p // R, p, p
    return hk, hv, dh


@triton.jit
def blocks_of(place, K, V, BK: tl.constexpr, BV: tl.constexpr):
    """Owner, key block and value block of a program. Programs of one owner read the same: they are neighbours."""
    keys, values = tl.cdiv(K, BK), tl.cdiv(V, BV)
    return place // (keys * values), (place // values % keys).to(tl.int32), (place % values).to(tl.int32)


@triton.jit
def state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED: tl.constexpr):
    """Offsets of the tile (kk, vv) of a state in ``[Hv, K, V]``, or ``[Hk, K, Hv * V]`` if MERGED."""
    if MERGED:
        corner, row = (hk * K * Hv + hv) * V, Hv * V
    else:
        corner, row = hv * K * V, V
    return corner + kk[:, None] * row + vv[None, :]


@triton.jit
def decayed_tile(x, b, rows, hk, kk, T, N, Hk, K, C: tl.constexpr, MODE: tl.constexpr):
    """Columns kk of the queries or keys of one head: as given, or (MODE 2) as `decayed_kernel` stored them."""
    if MODE == 2:
        x += ((b * N * C + rows[:, None]) * Hk + hk) * K + kk[None, :]
        tile = tl.load(x, mask=(kk < K)[None, :], other=0.0)
    else:
        x += ((b * T + rows[:, None]) * Hk + hk) * K + kk[None, :]
        tile = tl.load(x, mask=(rows < T)[:, None] & (kk < K)[None, :], other=0.0)
    return tile


@triton.jit
def chunk_decay(G, hk, dh, at, kk, inside, K, W, C: tl.constexpr, MODE: tl.constexpr):
    """Cumulative decay of the chunk at row `at`, and its total: ``[C, BK], [1, BK]``, or ``[C, 1], [1, 1]``."""
    rows = at + tl.arange(0, C)
    last = at + C - 1
    if MODE == 2:
        g = tl.load(G + rows[:, None] * W + hk * K + kk[None, :], mask=inside[None, :], other=0.0)
        total = tl.load(G + last * W + hk * K + kk, mask=inside, other=0.0)[None, :]
    else:
        g = tl.load(G + rows * W + dh)[:, None]
        total = tl.load(G + last * W + dh + tl.arange(0, 1))[None, :]
    return g, total


@kernel
def cumulative_kernel(decay, G, T, N, W, floor, C: tl.constexpr, BW: tl.constexpr):
    """G: sums of the log decays from the start of each chunk; decays stronger than `floor` count as `floor`."""
    place = tl.program_id(0).to(tl.int64)
    b, n = place // N, place % N
    rows = n * C + tl.arange(0, C)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (columns < W)[None, :]
    there = inside & (rows < T)[:, None]
    g = tl.load(decay + (b * T + rows[:, None]) * W + columns[None, :], mask=there, other=0.0).to(tl.float32)
    g = tl.cumsum(tl.maximum(g, floor), 0)
    tl.store(G + (b * N * C + rows[:, None]) * W + columns[None, :], g, mask=inside)


@kernel
def decayed_kernel(
    q, k, decay, G, early, late, T, N, W, floor, C: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """`cumulative_kernel` for a decay per channel, with the decayed queries `early` and keys `late`."""
    place = tl.program_id(0).to(tl.int64)
    b, n = place // N, place % N
    rows = n * C + tl.arange(0, C)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (columns < W)[None, :]
    there = inside & (rows < T)[:, None]
    tile = (b * T + rows[:, None]) * W + columns[None, :]
    padded = (b * N * C + rows[:, None]) * W + columns[None, :]
    g = tl.maximum(tl.load(decay + tile, mask=there, other=0.0).to(tl.float32), floor)
    total = tl.sum(g, 0, keep_dims=True)
    g = tl.cumsum(g, 0)
    queries = tl.load(q + tile, mask=there, other=0.0).to(tl.float32)
    keys = tl.load(k + tile, mask=there, other=0.0).to(tl.float32)
    tl.store(G + padded, g, mask=inside)
    tl.store(early + padded, (queries * tl.exp(g)).to(early.dtype.element_ty), mask=inside)
    # The two sums round differently, but no key may grow.
    tl.store(late + padded, (keys * tl.exp(tl.minimum(total - g, 0.0))).to(late.dtype.element_ty), mask=inside)


@kernel
def scores_kernel(
    q, k, A, T, N, Hk, K, C: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A = q k^T on and below the diagonal of every chunk, without decay."""
    place = tl.program_id(0).to(tl.int64)
    b, n, hk = place // (N * Hk), (place // Hk) % N, place % Hk
    local = tl.arange(0, C)
    rows = n * C + local
    here = (rows < T)[:, None]
    total = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        tile = ((b * T + rows[:, None]) * Hk + hk) * K + kk[None, :]
        there = here & (kk < K)[None, :]
        queries = tl.load(q + tile, mask=there, other=0.0)
        keys = tl.load(k + tile, mask=there, other=0.0)
        total = product(queries, tl.trans(keys), total, DOT, UPCAST, PRECISION)
    total = tl.where(local[:, None] >= local[None, :], total, 0.0)
    place_out = ((b * N * C + rows[:, None]) * Hk + hk) * C + local[None, :]
    tl.store(A + place_out, total.to(A.dtype.element_ty))


@kernel
def channel_scores_kernel(
    q, k, G, A, T, N, Hk, K, C: tl.constexpr, SUB: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A_ij = sum_d q_id k_jd e^(G_id - G_jd), j <= i, for SUB rows i of a chunk.

    For keys before the sub-block, decays are measured from the token just before it, so no exponent is positive. Inside
    it the sum is computed column by column.
    """
    place = tl.program_id(0).to(tl.int64)
    blocks = C // SUB
    sub = place % blocks
    place = place // blocks
    b, n, hk = place // (N * Hk), (place // Hk) % N, place % Hk
    chunk, first = n * C, n * C + sub * SUB
    rows, columns, inner = first + tl.arange(0, SUB), tl.arange(0, C), tl.arange(0, SUB)
    before = columns < sub * SUB
    G += b * N * C * Hk * K
    total = tl.zeros([SUB, C], tl.float32)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        inside = kk < K
        tile = ((b * T + rows[:, None]) * Hk + hk) * K + kk[None, :]
        queries = tl.load(q + tile, mask=(rows < T)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        g = tl.load(G + (rows[:, None] * Hk + hk) * K + kk[None, :], mask=inside[None, :], other=0.0)
        reference = tl.load(G + ((first - 1) * Hk + hk) * K + kk, mask=kk < tl.where(sub > 0, K, 0), other=0.0)
        past = chunk + columns
        there = (before & (past < T))[:, None] & inside[None, :]
        keys = tl.load(k + ((b * T + past[:, None]) * Hk + hk) * K + kk[None, :], mask=there, other=0.0).to(tl.float32)
        g_past = tl.load(G + (past[:, None] * Hk + hk) * K + kk[None, :], mask=there, other=0.0)
        keys *= tl.exp(tl.where(there, reference[None, :] - g_past, 0.0))
        decayed = queries * tl.exp(g - reference[None, :])
        total = product(decayed, tl.trans(keys), total, DOT, UPCAST, PRECISION)
        for j in range(SUB):
            row = first + j
            known = kk < tl.where(row < T, K, 0)
            key = tl.load(k + ((b * T + row) * Hk + hk) * K + kk, mask=known, other=0.0).to(tl.float32)
            g_row = tl.load(G + (row * Hk + hk) * K + kk, mask=inside, other=0.0)
            weight = tl.exp(tl.minimum(g - g_row[None, :], 0.0))
            score = tl.sum(queries * weight * key[None, :], 1)
            score = tl.where(inner >= j, score, 0.0)
            total += tl.where(columns[None, :] == sub * SUB + j, score[:, None], 0.0)
    place_out = ((b * N * C + rows[:, None]) * Hk + hk) * C + columns[None, :]
    tl.store(A + place_out, total.to(A.dtype.element_ty))


@triton.jit
def kept_by(G, at, b, hk, kk, N, K, W, C: tl.constexpr, MODE: tl.constexpr):
    """By how much the chunk at row `at` scales a state: ``[BK, 1]`` (MODE 2), else 1 or the total of `chunk_decay`.

    It is no operand of a product, so the compiler does not load it early: read it well before it is used.
    """
    if MODE == 2:
        kept = tl.exp(tl.load(G + (b * N * C + at + C - 1) * W + hk * K + kk, mask=kk < K, other=0.0))[:, None]
    else:
        kept = 1.0
    return kept


@triton.jit
def _after_chunk(
    S, kept, k, v, G, at, b, hk, hv, dh, kk, vv, T, N, Hk, Hv, K, V, W, C: tl.constexpr, MODE: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile (kk, vv) of a state after the chunk at row `at`, from the one before it."""
    rows = at + tl.arange(0, C)
    keys = decayed_tile(k, b, rows, hk, kk, T, N, Hk, K, C, MODE)
    there = (rows < T)[:, None] & (vv < V)[None, :]
    values = tl.load(v + ((b * T + rows[:, None]) * Hv + hv) * V + vv[None, :], mask=there, other=0.0)
    if MODE == 2:
        S *= kept
    if MODE == 1:
        g, total = chunk_decay(G + b * N * C * W, hk, dh, at, kk, kk < K, K, W, C, MODE)
        S *= tl.exp(total)
        values = values.to(tl.float32) * tl.exp(total - g)
    return product(tl.trans(keys), values, S, DOT, UPCAST, PRECISION)


@kernel
def ends_kernel(
    k, v, G, kept, ends, T, N, first, chunks, segments, Hk, Hv, R, P, K, V, W,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How each segment but the last changes the state before it: to `kept` * state + `ends`. Else as `states_kernel`.

    `kept` ``[B, segments - 1, P, K]``, `ends` ``[B, segments - 1, P, K, V]``, both float32.
    """
    place, key_block, value_block = blocks_of(tl.program_id(0).to(tl.int64), K, V, BK, BV)
    segment, state = (place % (segments - 1)).to(tl.int32), place // (segments - 1)
    b = state // P
    hk, hv, dh = pair_heads(state % P, Hv, R, MERGED)
    kk = key_block * BK + tl.arange(0, BK)
    vv = value_block * BV + tl.arange(0, BV)
    per = (chunks + segments - 1) // segments
    S = tl.zeros([BK, BV], tl.float32)
    log_kept = tl.zeros([BK], tl.float32)
    for i in range(segment * per, (segment + 1) * per):
        at = (first + i) * C
        kept_here = kept_by(G, at, b, hk, kk, N, K, W, C, MODE)
        S = _after_chunk(
            S, kept_here, k, v, G, at, b, hk, hv, dh, kk, vv, T, N, Hk, Hv, K, V, W, C, MODE, DOT, UPCAST, PRECISION
        )
        last = G + b * N * C * W + (at + C - 1) * W
        if MODE == 2:
            log_kept += tl.load(last + hk * K + kk, mask=kk < K, other=0.0)
        if MODE == 1:
            log_kept += tl.load(last + dh)
    segment += b * (segments - 1)
    tile = state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED)
    tl.store(ends + segment * P * K * V + tile, S, mask=(kk < K)[:, None] & (vv < V)[None, :])
    once = kk < tl.where(value_block == 0, K, 0)
    tl.store(kept + (segment * P + state % P) * K + kk, tl.exp(log_kept), mask=once)


@kernel
def states_kernel(
    k, v, G, start, kept, ends, states, final, T, N, first, chunks, segments, Hk, Hv, R, P, K, V, W,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each of `chunks` chunks from chunk `first` on, and after the last; S stays in registers.

    A program walks over one segment of these chunks. The state before the segment comes from `kept` and `ends`.
    """
    place, key_block, value_block = blocks_of(tl.program_id(0).to(tl.int64), K, V, BK, BV)
    segment, state = (place % segments).to(tl.int32), place // segments
    b = state // P
    hk, hv, dh = pair_heads(state % P, Hv, R, MERGED)
    kk = key_block * BK + tl.arange(0, BK)
    vv = value_block * BV + tl.arange(0, BV)
    tile = state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED)
    inside = (kk < K)[:, None] & (vv < V)[None, :]
    size = P * K * V
    per = (chunks + segments - 1) // segments
    S = tl.load(start + b * size + tile, mask=inside, other=0.0)
    for j in range(segment):
        before = b * (segments - 1) + j
        factor = tl.load(kept + (before * P + state % P) * K + kk, mask=kk < K, other=0.0)
        S = S * factor[:, None] + tl.load(ends + before * size + tile, mask=inside, other=0.0)
    for i in range(segment * per, tl.minimum((segment + 1) * per, chunks)):
        at = (first + i) * C
        kept_here = kept_by(G, at, b, hk, kk, N, K, W, C, MODE)
        tl.store(states + (b * chunks + i) * size + tile, S.to(states.dtype.element_ty), mask=inside)
        S = _after_chunk(
            S, kept_here, k, v, G, at, b, hk, hv, dh, kk, vv, T, N, Hk, Hv, K, V, W, C, MODE, DOT, UPCAST, PRECISION
        )
    ends_here = (kk < tl.where(segment == segments - 1, K, 0))[:, None]
    tl.store(final + b * size + tile, S, mask=inside & ends_here)


@triton.jit
def mixed_scores(A, M, G, b, hk, hv, dh, at, N, Hk, Hv, W, C: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr):
    """The part of the scores of value head hv that key head hk gives: ``[C, C]``, zero above the diagonal."""
    local = tl.arange(0, C)
    rows = b * N * C + at + local
    scores = tl.load(A + (rows[:, None] * Hk + hk) * C + local[None, :]).to(tl.float32)
    if MODE == 1:
        g = tl.load(G + rows * W + dh)
        scores *= tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0))
    if MERGED:
        scores *= tl.load(M + hk * Hv + hv)
    return scores


@kernel
def output_kernel(
    q, v, G, A, M, states, o, scale, T, N, first, chunks, Hk, Hv, R, P, K, V, W,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = scale * (sum over key heads of M (q e^G) S + tril(scores) v) for one chunk of a value head."""
    place = tl.program_id(0).to(tl.int64)
    b, i, hv = place // (chunks * Hv), (place // Hv) % chunks, place % Hv
    at = (first + i) * C
    rows = at + tl.arange(0, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    states += (b * chunks + i) * P * K * V
    total, part = tl.zeros([C, BV], tl.float32), tl.zeros([C, BV], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    low = 0 if MERGED else hv // R
    high = Hk if MERGED else hv // R + 1
    for hk in range(low, high):
        dh = hk if MERGED else hv
        if MERGED:
            part = tl.zeros([C, BV], tl.float32)
        else:
            scores = mixed_scores(A, M, G, b, hk, hv, dh, at, N, Hk, Hv, W, C, MODE, MERGED)
        for start in range(0, K, BK):
            kk = start + tl.arange(0, BK)
            x = decayed_tile(q, b, rows, hk, kk, T, N, Hk, K, C, MODE)
            tile = state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED)
            S = tl.load(states + tile, mask=(kk < K)[:, None] & (vv < V)[None, :], other=0.0)
            part = product(x, S, part, DOT, UPCAST, PRECISION)
        # A decay that all channels of a key head share is multiplied once, after the product.
        if MODE == 1:
            part *= tl.exp(tl.load(G + (b * N * C + rows) * W + dh))[:, None]
        if MERGED:
            total += part * tl.load(M + hk * Hv + hv)
    if MERGED:
        # After the products with states: during them there are no registers left for scores.
        for hk in range(low, high):
            scores += mixed_scores(A, M, G, b, hk, hv, hk, at, N, Hk, Hv, W, C, MODE, MERGED)
    else:
        total = part
    tile = ((b * T + rows[:, None]) * Hv + hv) * V + vv[None, :]
    there = (rows < T)[:, None] & (vv < V)[None, :]
    values = tl.load(v + tile, mask=there, other=0.0)
    total = product(scores, values, total, DOT, UPCAST, PRECISION)
    tl.store(o + tile, (scale * total).to(o.dtype.element_ty), mask=there)
