r"""Backward kernels of chunked gated linear attention; shapes and letters as in forward.py.

With :math:`D` the gradient of the state after a chunk, :math:`S` the state before it and :math:`W_{ij}` the gradient of
the scores times the scores, the gradient of the log decay of token t of the chunk is

.. math:: \sum_{i \ge t} q_i \cdot dq_i^{inter} + \sum_{i \ge t > j} W_{ij} + \sum_{j < t} k_j \cdot dk_j^{inter}
          + e^{G_C} \langle S, D \rangle

(for a decay per channel: channel by channel). W leaves out the score of every token with itself, and the sums stay
inside a chunk. Over the whole sequence the same gradient would be a small difference of large sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrecall.ops.kernels.launch import kernel, product, suffix_sum
from longrecall.ops.linear_attention.triton.forward import (
    blocks_of,
    chunk_decay,
    decayed_tile,
    kept_by,
    mixed_scores,
    pair_heads,
    state_offsets,
)


@kernel
def state_gradients_kernel(
    q, do, G, M, end, gradients, start, scale, T, N, first, chunks, Hk, Hv, R, P, K, V, W,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk, last chunk first, and of the state before the first."""
    place, key_block, value_block = blocks_of(tl.program_id(0).to(tl.int64), K, V, BK, BV)
    b = place // P
    hk, hv, dh = pair_heads(place % P, Hv, R, MERGED)
    kk = key_block * BK + tl.arange(0, BK)
    vv = value_block * BV + tl.arange(0, BV)
    tile = state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED)
    inside = (kk < K)[:, None] & (vv < V)[None, :]
    size = P * K * V
    factor = scale
    if MERGED:
        factor *= tl.load(M + hk * Hv + hv)
    D = tl.load(end + b * size + tile, mask=inside, other=0.0)
    for j in range(chunks):
        i = chunks - 1 - j
        at = (first + i) * C
        kept = kept_by(G, at, b, hk, kk, N, K, W, C, MODE)
        tl.store(gradients + (b * chunks + i) * size + tile, D.to(gradients.dtype.element_ty), mask=inside)
        rows = at + tl.arange(0, C)
        x = decayed_tile(q, b, rows, hk, kk, T, N, Hk, K, C, MODE)
        there = (rows < T)[:, None] & (vv < V)[None, :]
        dy = tl.load(do + ((b * T + rows[:, None]) * Hv + hv) * V + vv[None, :], mask=there, other=0.0)
        if MODE == 2:
            D *= kept
            D += factor * product(tl.trans(x), dy, tl.zeros([BK, BV], tl.float32), DOT, UPCAST, PRECISION)
        else:
            dy = dy.to(tl.float32) * factor
            if MODE == 1:
                g, total = chunk_decay(G + b * N * C * W, hk, dh, at, kk, kk < K, K, W, C, MODE)
                D *= tl.exp(total)
                dy *= tl.exp(g)
            D = product(tl.trans(x), dy, D, DOT, UPCAST, PRECISION)
    tl.store(start + b * size + tile, D, mask=inside)


@kernel
def values_kernel(
    k, do, G, A, M, gradients, dv, scale, T, N, first, chunks, Hk, Hv, R, P, K, V, W,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = sum over key heads of (k e^(G_C - G)) D + scale * scores^T do for one chunk of a value head."""
    place = tl.program_id(0).to(tl.int64)
    b, i, hv = place // (chunks * Hv), (place // Hv) % chunks, place % Hv
    at = (first + i) * C
    rows = at + tl.arange(0, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    gradients += (b * chunks + i) * P * K * V
    total_dv, part = tl.zeros([C, BV], tl.float32), tl.zeros([C, BV], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    low = 0 if MERGED else hv // R
    high = Hk if MERGED else hv // R + 1
    for hk in range(low, high):
        dh = hk if MERGED else hv
        scores += mixed_scores(A, M, G, b, hk, hv, dh, at, N, Hk, Hv, W, C, MODE, MERGED)
        if MERGED and MODE == 1:
            part = tl.zeros([C, BV], tl.float32)
        for begin in range(0, K, BK):
            kk = begin + tl.arange(0, BK)
            keys = decayed_tile(k, b, rows, hk, kk, T, N, Hk, K, C, MODE)
            tile = state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED)
            D = tl.load(gradients + tile, mask=(kk < K)[:, None] & (vv < V)[None, :], other=0.0)
            part = product(keys, D, part, DOT, UPCAST, PRECISION)
        if MODE == 1:
            # A decay that all channels of a key head share is multiplied once, after the product.
            g, last = chunk_decay(G + b * N * C * W, dh, dh, at, vv, vv < V, K, W, C, MODE)
            part *= tl.exp(last - g)
            if MERGED:
                total_dv += part
    if not (MERGED and MODE == 1):
        total_dv = part
    tile = ((b * T + rows[:, None]) * Hv + hv) * V + vv[None, :]
    there = (rows < T)[:, None] & (vv < V)[None, :]
    dy = tl.load(do + tile, mask=there, other=0.0)
    total_dv = product(tl.trans(scores * scale), dy, total_dv, DOT, UPCAST, PRECISION)
    tl.store(dv + tile, total_dv.to(dv.dtype.element_ty), mask=there)


@triton.jit
def _value_tiles(do, v, b, rows, hv, vv, T, Hv, V):
    """Columns vv of the output's gradient and of the values of one head, zeros beyond the last token."""
    tile = ((b * T + rows[:, None]) * Hv + hv) * V + vv[None, :]
    there = (rows < T)[:, None] & (vv < V)[None, :]
    return tl.load(do + tile, mask=there, other=0.0), tl.load(v + tile, mask=there, other=0.0)


@kernel
def score_gradients_kernel(
    v, do, G, A, M, dA, dg, dM, scale, T, N, Hk, Hv, R, P, V, W,
    C: tl.constexpr, BV: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA of a key head's scores from every value head that reads it, its parts of dg (MODE 1), and dM.

    WHOLE: one tile holds all values of a head. Without an inner loop, the loop over heads loads the next head early.
    """
    place = tl.program_id(0).to(tl.int64)
    b, n, hk = place // (N * Hk), (place // Hk) % N, place % Hk
    local = tl.arange(0, C)
    rows = n * C + local
    causal = local[:, None] >= local[None, :]
    score_tile = A + ((b * N * C + rows[:, None]) * Hk + hk) * C + local[None, :]
    total = tl.zeros([C, C], tl.float32)
    for j in range(Hv if MERGED else R):
        hv = j if MERGED else hk * R + j
        part = tl.zeros([C, C], tl.float32)
        if WHOLE:
            dy, values = _value_tiles(do, v, b, rows, hv, tl.arange(0, BV), T, Hv, V)
            part = product(dy, tl.trans(values), part, DOT, UPCAST, PRECISION)
        else:
            for start in range(0, V, BV):
                dy, values = _value_tiles(do, v, b, rows, hv, start + tl.arange(0, BV), T, Hv, V)
                part = product(dy, tl.trans(values), part, DOT, UPCAST, PRECISION)
        part = tl.where(causal, part * scale, 0.0)
        if MODE == 1:
            g = tl.load(G + (b * N * C + rows) * W + (hk if MERGED else hv))
            part *= tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0))
        if MERGED:
            mixed = tl.sum(tl.sum(part * tl.load(score_tile).to(tl.float32), 1), 0)
            tl.store(dM + ((b * N + n) * Hk + hk) * Hv + hv, mixed)
            part *= tl.load(M + hk * Hv + hv)
        if MODE == 1:
            both = tl.where(local[:, None] > local[None, :], part * tl.load(score_tile).to(tl.float32), 0.0)
            pair = hk * Hv + hv if MERGED else hv
            tl.store(dg + (b * N * C + rows) * P + pair, tl.sum(both, 1) - tl.sum(both, 0))
        total += part
    tl.store(dA + ((b * N * C + rows[:, None]) * Hk + hk) * C + local[None, :], total)


@kernel
def channel_gradients_kernel(
    q, k, G, dA, dq, dk, T, N, Hk, K, C: tl.constexpr, SUB: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of dq and dk that comes from a chunk's scores, for SUB of its tokens; decay per channel.

    A token's score with itself is left out. Scores with other sub-blocks are products: the decay of earlier keys is
    measured from the token before these rows, that of later queries from the last row. Inside the sub-block they are
    computed row by row. dq and dk are float32 ``[B, N * C, Hk, K]``.
    """
    place = tl.program_id(0).to(tl.int64)
    blocks = C // SUB
    sub = place % blocks
    place = place // blocks
    b, n, hk = place // (N * Hk), (place // Hk) % N, place % Hk
    chunk, first = n * C, n * C + sub * SUB
    all_rows, inner = tl.arange(0, C), tl.arange(0, SUB)
    rows = first + inner
    kk = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = kk < K
    G += b * N * C * Hk * K
    dA += b * N * C * Hk * C
    mine = (rows[:, None] * Hk + hk) * K + kk[None, :]
    g = tl.load(G + mine, mask=inside[None, :], other=0.0)
    others = chunk + all_rows
    theirs = (others[:, None] * Hk + hk) * K + kk[None, :]
    g_others = tl.load(G + theirs, mask=inside[None, :], other=0.0)
    before = (all_rows < sub * SUB) & (others < T)
    after = (all_rows >= (sub + 1) * SUB) & (others < T)
    # The cumulative log decay before the first sub-block is 0.
    reference = tl.load(G + ((first - 1) * Hk + hk) * K + kk, mask=kk < tl.where(sub > 0, K, 0), other=0.0)[None, :]
    there = before[:, None] & inside[None, :]
    keys = tl.load(k + b * T * Hk * K + theirs, mask=there, other=0.0).to(tl.float32)
    keys *= tl.exp(tl.where(there, reference - g_others, 0.0))
    d = tl.load(dA + (rows[:, None] * Hk + hk) * C + all_rows[None, :])
    total_q = product(d, keys, tl.zeros([SUB, BK], tl.float32), DOT, UPCAST, PRECISION)
    total_q *= tl.exp(g - reference)
    reference = tl.load(G + ((first + SUB - 1) * Hk + hk) * K + kk, mask=inside, other=0.0)[None, :]
    there = after[:, None] & inside[None, :]
    queries = tl.load(q + b * T * Hk * K + theirs, mask=there, other=0.0).to(tl.float32)
    queries *= tl.exp(tl.where(there, g_others - reference, 0.0))
    d = tl.load(dA + (others[None, :] * Hk + hk) * C + sub * SUB + inner[:, None])
    total_k = product(d, queries, tl.zeros([SUB, BK], tl.float32), DOT, UPCAST, PRECISION)
    total_k *= tl.exp(reference - g)
    for j in range(SUB):
        row = first + j
        one = (row * Hk + hk) * K + kk
        known = kk < tl.where(row < T, K, 0)
        g_row = tl.load(G + one, mask=inside, other=0.0)[None, :]
        key = tl.load(k + b * T * Hk * K + one, mask=known, other=0.0).to(tl.float32)[None, :]
        query = tl.load(q + b * T * Hk * K + one, mask=known, other=0.0).to(tl.float32)[None, :]
        column = tl.load(dA + (rows * Hk + hk) * C + sub * SUB + j)
        total_q += tl.where(inner > j, column, 0.0)[:, None] * key * tl.exp(tl.minimum(g - g_row, 0.0))
        across = tl.load(dA + (row * Hk + hk) * C + sub * SUB + inner)
        total_k += tl.where(inner < j, across, 0.0)[:, None] * query * tl.exp(tl.minimum(g_row - g, 0.0))
    tl.store(dq + b * N * C * Hk * K + mine, total_q, mask=inside[None, :])
    tl.store(dk + b * N * C * Hk * K + mine, total_k, mask=inside[None, :])


@triton.jit
def _through_states(
    part_q, part_k, part_s, do, v, states, gradients, b, rows, hk, hv, kk, vv, T, Hv, K, V, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the parts of columns vv of a state to do S^T, v D^T and, row by row, <S, D>."""
    dy, values = _value_tiles(do, v, b, rows, hv, vv, T, Hv, V)
    tile = state_offsets(hk, hv, kk, vv, K, V, Hv, MERGED)
    there = (kk < K)[:, None] & (vv < V)[None, :]
    S = tl.load(states + tile, mask=there, other=0.0)
    D = tl.load(gradients + tile, mask=there, other=0.0)
    part_q = product(dy, tl.trans(S), part_q, DOT, UPCAST, PRECISION)
    part_k = product(values, tl.trans(D), part_k, DOT, UPCAST, PRECISION)
    return part_q, part_k, part_s + tl.sum(S.to(tl.float32) * D.to(tl.float32), 1)


@triton.jit
def from_states(
    x, y, do, v, G, M, states, gradients, dg, ds, dM, scale, T, N, at, b, n, part, hk, kk, Hk, Hv, R, P, K, V, W, B,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk through the states and, channel by channel, <S, D>; stores the terms of dg (MODE 1) and dM."""
    rows = at + tl.arange(0, C)
    total_q, total_k = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    total_s = tl.zeros([BK], tl.float32)
    g, last = tl.zeros([C, 1], tl.float32), tl.zeros([1, 1], tl.float32)
    if MODE == 2:
        g, last = chunk_decay(G + b * N * C * W, hk, hk, at, kk, kk < K, K, W, C, MODE)
    for j in range(Hv if MERGED else R):
        hv = j if MERGED else hk * R + j
        part_q, part_k = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
        part_s = tl.zeros([BK], tl.float32)
        if WHOLE:
            part_q, part_k, part_s = _through_states(
                part_q, part_k, part_s, do, v, states, gradients, b, rows, hk, hv, kk, tl.arange(0, BV),
                T, Hv, K, V, MERGED, DOT, UPCAST, PRECISION,
            )  # fmt: skip
        else:
            for start in range(0, V, BV):
                part_q, part_k, part_s = _through_states(
                    part_q, part_k, part_s, do, v, states, gradients, b, rows, hk, hv, kk, start + tl.arange(0, BV),
                    T, Hv, K, V, MERGED, DOT, UPCAST, PRECISION,
                )  # fmt: skip
        if MODE == 1:
            g, last = chunk_decay(G + b * N * C * W, hk, hk if MERGED else hv, at, kk, kk < K, K, W, C, MODE)
        mine, pair = part * B + b, hk * Hv + hv if MERGED else hv
        part_q *= tl.exp(g) * scale
        part_k *= tl.exp(last - g)
        if MERGED:
            mixed = tl.sum(tl.sum(x.to(tl.float32) * part_q, 1), 0)
            tl.store(dM + ((mine * N + n) * Hk + hk) * Hv + hv, mixed)
            part_q *= tl.load(M + hk * Hv + hv)
        if MODE == 1:
            # Sums over the chunk's tokens would make all warps wait once per head: `decay_gradients_kernel` computes
            # them.
            to_keys = dg + tl.cdiv(K, BK) * B * N * C * P
            tl.store(dg + (mine * N * C + rows) * P + pair, tl.sum(x.to(tl.float32) * part_q, 1))
            tl.store(to_keys + (mine * N * C + rows) * P + pair, tl.sum(y.to(tl.float32) * part_k, 1))
            tl.store(ds + ((mine * N + n) * P + pair) * BK + tl.arange(0, BK), part_s)
        total_q += part_q
        total_k += part_k
        if MODE == 2:
            total_s += part_s
    return total_q, total_k, total_s[None, :] * tl.exp(last)


@kernel
def keys_kernel(
    q, k, v, do, decay, G, M, dA, states, gradients, dq_inner, dk_inner, dq, dk, dg, ds, dM, scale, floor,
    B, T, N, first, chunks, Hk, Hv, R, P, K, V, W,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr, MERGED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of a block of channels of one chunk of a key head, and dg where decays are per channel."""
    place, part, _ = blocks_of(tl.program_id(0).to(tl.int64), K, 1, BK, 1)
    b, i, hk = place // (chunks * Hk), (place // Hk) % chunks, place % Hk
    at = (first + i) * C
    local = tl.arange(0, C)
    rows = at + local
    kk = part * BK + tl.arange(0, BK)
    there = (rows < T)[:, None] & (kk < K)[None, :]
    tile = ((b * T + rows[:, None]) * Hk + hk) * K + kk[None, :]
    x, y = tl.load(q + tile, mask=there, other=0.0), tl.load(k + tile, mask=there, other=0.0)
    offset = (b * chunks + i) * P * K * V
    total_q, total_k, total_s = from_states(
        x, y, do, v, G, M, states + offset, gradients + offset, dg, ds, dM, scale, T, N, at, b, first + i, part, hk, kk,
        Hk, Hv, R, P, K, V, W, B, C, BK, BV, WHOLE, MODE, MERGED, DOT, UPCAST, PRECISION,
    )  # fmt: skip
    padded = (b * N * C + rows) * Hk + hk
    if MODE == 2:
        x, y = x.to(tl.float32), y.to(tl.float32)
        inner = padded[:, None] * K + kk[None, :]
        inner_q = tl.load(dq_inner + inner, mask=there, other=0.0)
        inner_k = tl.load(dk_inner + inner, mask=there, other=0.0)
        from_keys = y * total_k
        share = suffix_sum(x * (total_q + inner_q) - y * inner_k) + tl.cumsum(from_keys, 0) - from_keys + total_s
        raw = tl.load(decay + tile, mask=there, other=0.0).to(tl.float32)
        tl.store(dg + tile, tl.where(raw >= floor, share, 0.0), mask=there)
        own = tl.load(dA + padded * C + local)[:, None]
        total_q += inner_q + own * y
        total_k += inner_k + own * x
    else:
        d = tl.load(dA + padded[:, None] * C + local[None, :])
        total_q = product(d, y, total_q, DOT, UPCAST, PRECISION)
        total_k = product(tl.trans(d), x, total_k, DOT, UPCAST, PRECISION)
    tl.store(dq + tile, total_q.to(dq.dtype.element_ty), mask=there)
    tl.store(dk + tile, total_k.to(dk.dtype.element_ty), mask=there)


@kernel
def decay_gradients_kernel(
    decay, G, dg, ds, inner, d_decay, floor, B, T, N, P, W, parts, EACH: tl.constexpr,
    C: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The gradient of a log decay per head: sums of the terms that `keys_kernel` and `score_gradients_kernel` stored.

    dg ``[2, parts, B, N * C, P]``, ds ``[B, N, P]``, inner ``[B, N * C, P]``; EACH states share a decay.
    """
    place = tl.program_id(0).to(tl.int64)
    b, n = place // N, place % N
    rows, columns = n * C + tl.arange(0, C), tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (columns < W)[None, :]
    at = b * N * C + rows[:, None]
    from_queries, from_keys = tl.zeros([C, BW], tl.float32), tl.zeros([C, BW], tl.float32)
    from_states = tl.zeros([1, BW], tl.float32)
    for j in range(EACH):
        pair = columns[None, :] * EACH + j
        from_states += tl.load(ds + (b * N + n) * P + pair, mask=inside, other=0.0)
        from_queries += tl.load(inner + at * P + pair, mask=inside, other=0.0)
        for part in range(parts):
            from_queries += tl.load(dg + (part * B * N * C + at) * P + pair, mask=inside, other=0.0)
            from_keys += tl.load(dg + ((parts + part) * B * N * C + at) * P + pair, mask=inside, other=0.0)
    last = tl.load(G + (b * N * C + n * C + C - 1) * W + columns[None, :], mask=inside, other=0.0)
    share = suffix_sum(from_queries) + tl.cumsum(from_keys, 0) - from_keys + from_states * tl.exp(last)
    tile = (b * T + rows[:, None]) * W + columns[None, :]
    there = inside & (rows < T)[:, None]
    raw = tl.load(decay + tile, mask=there, other=0.0).to(tl.float32)
    tl.store(d_decay + tile, tl.where(raw >= floor, share, 0.0).to(d_decay.dtype.element_ty), mask=there)
