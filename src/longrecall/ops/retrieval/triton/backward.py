r"""Kernels of retrieval, second half: the gradients.

With p the softmax's shares, :math:`\Delta = \bar o \cdot o` and :math:`\bar\ell_j = p_j (\bar o \cdot v_j - \Delta)`
(the null chunk's values are 0, its logits are constants): :math:`\bar q = \mathrm{scale} \sum_j \bar\ell_j k_j`,
:math:`\bar k_j = \mathrm{scale} \sum \bar\ell_j q`, :math:`\bar v_j = \sum p_j \bar o`. The last two are sums over all
queries that chose the chunk, which are found in a list of the choices sorted by chunk. So one program writes each
gradient. No atomics: two runs agree to the bit.
"""

import triton.language as tl

from longrecall.ops.kernels.launch import kernel, product
from longrecall.ops.retrieval.triton.forward import chunk_rows


@kernel
def query_gradients_kernel(
    q, k, v, chosen, weights, out, totals, d_out, d_q, d_weights, deltas, scale, T, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BH: tl.constexpr, BU: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token and key head: `d_q` ``[B, T, H, D]``, `deltas` ``[B, T, H]``, its part of `d_weights` (B, T, G, C)."""
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, d, u = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BU)
    own, channel = h < H // G, (d < D)[None, :]
    head = row * H + g * (H // G) + h
    cells, stored = head[:, None] * D + d[None, :], own[:, None] & channel
    query = tl.load(q + cells, mask=stored, other=0.0)
    d_o = tl.load(d_out + cells, mask=stored, other=0.0)
    delta = tl.sum(tl.load(out + cells, mask=stored, other=0.0).to(tl.float32) * d_o.to(tl.float32), 1)
    sums = tl.load(totals + head, mask=own, other=0.0)
    d_query = tl.zeros([BH, BD], tl.float32)
    for slot in range(C):
        index = tl.load(chosen + row * C + slot).to(tl.int64)
        weight = tl.load(weights + row * C + slot).to(tl.float32) if WEIGHTED else 0.0
        d_weight = tl.zeros([BH], tl.float32)
        for first in range(0, U, BU):
            token = first + u
            seen = token < tl.where(index < 0, 0, U)
            place = chunk_rows(row // T, index, token, g, S, G, D, U)[:, None] + d[None, :]
            key = tl.load(k + place, mask=seen[:, None] & channel, other=0.0)
            value = tl.load(v + place, mask=seen[:, None] & channel, other=0.0)
            zeros = tl.zeros([BH, BU], tl.float32)
            logits = product(query, tl.trans(key), zeros, DOT, UPCAST, PRECISION) * scale + weight
            counted = seen[None, :] & own[:, None]
            share = tl.exp(tl.where(counted, logits - sums[:, None], float("-inf")))
            d_logits = share * (product(d_o, tl.trans(value), zeros, DOT, UPCAST, PRECISION) - delta[:, None])
            d_query = product(d_logits, key, d_query, DOT, UPCAST, PRECISION)
            d_weight += tl.sum(d_logits, 1)
        if WEIGHTED:
            tl.store(d_weights + (row * G + g) * C + slot, tl.sum(d_weight, 0))
    tl.store(d_q + cells, (d_query * scale).to(d_q.dtype.element_ty), mask=stored)
    tl.store(deltas + head, delta, mask=own)


@kernel
def query_gradients_rows_kernel(
    q, k, v, chosen, weights, out, totals, d_out, d_q, d_weights, deltas, scale, R, T, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The same for BR tokens and one query head; `d_weights` ``[B, T, H, C]``."""
    row, h = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1)
    d, g = tl.arange(0, BD), h // (H // G)
    inside, channel = row < R, (d < D)[None, :]
    head = row * H + h
    cells, stored = head[:, None] * D + d[None, :], inside[:, None] & channel
    query = tl.load(q + cells, mask=stored, other=0.0).to(tl.float32) * scale
    d_o = tl.load(d_out + cells, mask=stored, other=0.0).to(tl.float32)
    delta = tl.sum(tl.load(out + cells, mask=stored, other=0.0).to(tl.float32) * d_o, 1)
    sums = tl.load(totals + head, mask=inside, other=0.0)
    d_query = tl.zeros([BR, BD], tl.float32)
    for slot in range(C):
        index = tl.load(chosen + row * C + slot, mask=inside, other=-1).to(tl.int64)
        seen = index >= 0
        weight = tl.zeros([BR], tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + row * C + slot, mask=inside, other=0.0).to(tl.float32)
        d_weight = tl.zeros([BR], tl.float32)
        for token in range(U):
            place = chunk_rows(row // T, index, token, g, S, G, D, U)[:, None] + d[None, :]
            key = tl.load(k + place, mask=seen[:, None] & channel, other=0.0).to(tl.float32)
            value = tl.load(v + place, mask=seen[:, None] & channel, other=0.0).to(tl.float32)
            share = tl.exp(tl.where(seen, tl.sum(query * key, 1) + weight - sums, float("-inf")))
            d_logit = share * (tl.sum(d_o * value, 1) - delta)
            d_query += d_logit[:, None] * key
            d_weight += d_logit
        if WEIGHTED:
            tl.store(d_weights + head * C + slot, d_weight, mask=inside)
    tl.store(d_q + cells, (d_query * scale).to(d_q.dtype.element_ty), mask=stored)
    tl.store(deltas + head, delta, mask=inside)


@kernel
def key_gradients_kernel(
    q, k, v, weights, order, bounds, totals, deltas, d_out, d_k, d_v, scale, T, N, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BL: tl.constexpr, BU: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BU tokens of one chunk and key head: `d_k` and `d_v` ``[B, S, G, D]``.

    `order` ``[B, T * C]`` lists the choices of each row by chunk: those of chunk c of row b stand from ``bounds[b, c]``
    to ``bounds[b, c + 1]``. A line of a tile is one choice and one of the query heads.
    """
    part, g = tl.program_id(0).to(tl.int64), tl.program_id(2)
    line, d, token = tl.arange(0, BL), tl.arange(0, BD), tl.program_id(1) * BU + tl.arange(0, BU)
    channel, real = (d < D)[None, :], token < U
    place = chunk_rows(part // N, part % N, token, g, S, G, D, U)[:, None] + d[None, :]
    stored = real[:, None] & channel
    key, value = tl.load(k + place, mask=stored, other=0.0), tl.load(v + place, mask=stored, other=0.0)
    d_key, d_value = tl.zeros([BU, BD], tl.float32), tl.zeros([BU, BD], tl.float32)
    HEADS: tl.constexpr = H // G
    bounds += part + part // N
    choices = (part // N) * T * C
    stop = tl.load(bounds + 1) * HEADS
    for start in range(tl.load(bounds) * HEADS, stop, BL):
        here = start + line
        inside = here < stop
        choice = choices + tl.load(order + choices + here // HEADS, mask=inside, other=0)
        head = (choice // C) * H + g * HEADS + here % HEADS
        cells, read = head[:, None] * D + d[None, :], inside[:, None] & channel
        query = tl.load(q + cells, mask=read, other=0.0)
        d_o = tl.load(d_out + cells, mask=read, other=0.0)
        zeros = tl.zeros([BL, BU], tl.float32)
        logits = product(query, tl.trans(key), zeros, DOT, UPCAST, PRECISION) * scale
        if WEIGHTED:
            logits += tl.load(weights + choice, mask=inside, other=0.0).to(tl.float32)[:, None]
        logits -= tl.load(totals + head, mask=inside, other=0.0)[:, None]
        share = tl.exp(tl.where(inside[:, None] & real[None, :], logits, float("-inf")))
        delta = tl.load(deltas + head, mask=inside, other=0.0)
        d_logits = share * (product(d_o, tl.trans(value), zeros, DOT, UPCAST, PRECISION) - delta[:, None])
        d_value = product(tl.trans(share), d_o, d_value, DOT, UPCAST, PRECISION)
        d_key = product(tl.trans(d_logits), query, d_key, DOT, UPCAST, PRECISION)
    tl.store(d_k + place, (d_key * scale).to(d_k.dtype.element_ty), mask=stored)
    tl.store(d_v + place, d_value.to(d_v.dtype.element_ty), mask=stored)


@kernel
def score_queries_kernel(
    vectors, chosen, d_scores, d_queries, R, T, N,
    E: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """`d_queries` ``[B, T, E]`` of the scores query . vector of the chosen chunks, for BR of the R = B * T tokens."""
    row, e = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BE)
    inside, column = row < R, (e < E)[None, :]
    total = tl.zeros([BR, BE], tl.float32)
    for slot in range(C):
        index = tl.load(chosen + row * C + slot, mask=inside, other=-1).to(tl.int64)
        seen = index >= 0
        gradient = tl.load(d_scores + row * C + slot, mask=seen, other=0.0).to(tl.float32)
        place = ((row // T) * N + index)[:, None] * E + e[None, :]
        vector = tl.load(vectors + place, mask=seen[:, None] & column, other=0.0).to(tl.float32)
        total += gradient[:, None] * vector
    place = row[:, None] * E + e[None, :]
    tl.store(d_queries + place, total.to(d_queries.dtype.element_ty), mask=inside[:, None] & column)


@kernel
def score_vectors_kernel(
    queries, order, bounds, d_scores, d_vectors, T, N,
    E: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """`d_vectors` ``[B, N, E]`` of the same scores, for the vector of one chunk; `order` and `bounds` as above."""
    part, entry, e = tl.program_id(0).to(tl.int64), tl.arange(0, BR), tl.arange(0, BE)
    column = (e < E)[None, :]
    total = tl.zeros([BR, BE], tl.float32)
    bounds += part + part // N
    choices = (part // N) * T * C
    stop = tl.load(bounds + 1)
    for start in range(tl.load(bounds), stop, BR):
        inside = start + entry < stop
        choice = choices + tl.load(order + choices + start + entry, mask=inside, other=0)
        gradient = tl.load(d_scores + choice, mask=inside, other=0.0).to(tl.float32)
        place = (choice // C)[:, None] * E + e[None, :]
        query = tl.load(queries + place, mask=inside[:, None] & column, other=0.0).to(tl.float32)
        total += gradient[:, None] * query
    tl.store(d_vectors + part * E + e, tl.sum(total, 0).to(d_vectors.dtype.element_ty), mask=e < E)
