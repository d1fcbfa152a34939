"""Kernels of retrieval, first half: the choice of chunks, and attention to the chosen ones.

Keys and values are read in place, by the number of their chunk: nothing is gathered in memory. A program of the wide
kernels serves one token and all query heads of one key head, which share its reads. Chunks of fewer than 16 tokens
would leave a matrix product mostly empty. There a program serves many tokens of one head, without matrix products.
"""

import triton
import triton.language as tl

from longrecall.ops.kernels.launch import kernel, product, softmax_step


@triton.jit
def _best(
    query, vectors, b, ended, slot, n, e, N,
    E: tl.constexpr, C: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products and numbers of the C best among the first `ended` chunks, unordered; -1 where there are fewer."""
    # Slots past C never count as the worst one, so nothing replaces them.
    best = tl.where(slot[None, :] < C, float("-inf"), float("inf")) + tl.zeros([BQ, BC], tl.float32)
    index = tl.full([BQ, BC], -1, tl.int32)
    for first in range(0, tl.max(ended, 0), BN):
        number = first + n
        place = (b * N + number)[:, None] * E + e[None, :]
        vector = tl.load(vectors + place, mask=(number < N)[:, None] & (e < E)[None, :], other=0.0)
        found = product(query, tl.trans(vector), tl.zeros([BQ, BN], tl.float32), DOT, UPCAST, PRECISION)
        found = tl.where(number[None, :] < ended[:, None], found, float("-inf"))
        turn = 0
        # At most C chunks of a block are among the C best; most blocks have fewer. An unrolled loop would compile for
        # seconds.
        while turn < C:
            top = tl.max(found, 1)
            at = tl.min(tl.where(found == top[:, None], number[None, :], N), 1)
            worst = tl.min(best, 1)
            last = tl.min(tl.where(best == worst[:, None], slot[None, :], BC), 1)
            better = top > worst
            replaced = (slot[None, :] == last[:, None]) & better[:, None]
            best = tl.where(replaced, top[:, None], best)
            index = tl.where(replaced, at[:, None], index)
            found = tl.where(number[None, :] == at[:, None], float("-inf"), found)
            turn = tl.where(tl.max(better.to(tl.int32), 0) > 0, turn + 1, C)
    return best, index


@kernel
def best_chunks_kernel(
    queries, vectors, finished, chosen, scores, T, N,
    E: tl.constexpr, C: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The C chunks of largest product with each query among the first `finished` ``[B, T]``, -1 where there are fewer.

    `queries` ``[B, T, E]``, `vectors` ``[B, N, E]``. The running best stay in registers. Of equal scores the earlier
    chunk wins.
    """
    b = tl.program_id(1).to(tl.int64)
    t, e, slot, n = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, BE), tl.arange(0, BC), tl.arange(0, BN)
    row, inside = b * T + t, t < T
    query = tl.load(queries + row[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
    ended = tl.minimum(tl.load(finished + row, mask=inside, other=0), N).to(tl.int32)
    best, index = _best(query, vectors, b, ended, slot, n, e, N, E, C, BQ, BN, BC, DOT, UPCAST, PRECISION)
    stored = inside[:, None] & (slot < C)[None, :]
    place = row[:, None] * C + slot[None, :]
    tl.store(chosen + place, index.to(tl.int64), mask=stored)
    tl.store(scores + place, tl.where(index < 0, 0.0, best), mask=stored)


@kernel
def choose_chunks_kernel(
    queries, vectors, temperature, begun, chosen, weights, share, T, N,
    E: tl.constexpr, U: tl.constexpr, C: tl.constexpr, TOP: tl.constexpr, GIVEN: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Choice, logits and share for a text, whose token t may read the first t // U chunks.

    `queries` ``[B, T, E]``, of any norm, begin with the first token of the text or, if GIVEN, with token `begun`
    ``[1]``. Of the C best chunks the TOP best are `chosen` ``[B, T, TOP]``, the best first. `weights` are their cosines
    times exp(temperature), `share` ``[B, T]`` is their part of the sum over all C.
    """
    b = tl.program_id(1).to(tl.int64)
    t, e, slot, n = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, BE), tl.arange(0, BC), tl.arange(0, BN)
    row, inside = b * T + t, t < T
    query = tl.load(queries + row[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
    earlier = 0
    if GIVEN:
        earlier = tl.load(begun).to(tl.int32)
    ended = tl.where(inside, tl.minimum((earlier + t) // U, N), 0)
    best, index = _best(query, vectors, b, ended, slot, n, e, N, E, C, BQ, BN, BC, DOT, UPCAST, PRECISION)
    wide = query.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)
    factor = tl.exp(tl.load(temperature).to(tl.float32)) / norm
    found = tl.where(index >= 0, best, float("-inf"))
    ahead = found[:, None, :] > found[:, :, None]
    ahead = ahead | ((found[:, None, :] == found[:, :, None]) & (slot[None, None, :] < slot[None, :, None]))
    rank = tl.sum(ahead.to(tl.int32), 2)
    logits = tl.where(index >= 0, best, 0.0) * factor[:, None]
    largest = tl.max(tl.where(index >= 0, logits, float("-inf")), 1)
    part = tl.where(index >= 0, tl.exp(logits - tl.where(ended > 0, largest, 0.0)[:, None]), 0.0)
    taken = tl.sum(tl.where(rank < TOP, part, 0.0), 1) / tl.maximum(tl.sum(part, 1), 1e-30)
    stored = inside[:, None] & (rank < TOP)
    place = row[:, None] * TOP + rank
    tl.store(chosen + place, index.to(tl.int64), mask=stored)
    tl.store(weights + place, logits, mask=stored)
    tl.store(share + row, taken, mask=inside)


@triton.jit
def chunk_rows(b, index, token, g, S, G: tl.constexpr, D: tl.constexpr, U: tl.constexpr):
    """Where the rows of tokens `token` of chunk `index` begin in k or v ``[B, S, G, D]``."""
    return ((b * S + index * U + token) * G + g) * D


@kernel
def attend_kernel(
    q, k, v, chosen, weights, out, totals, scale, T, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BH: tl.constexpr, BU: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token and key head: `out` ``[B, T, H, D]`` and the logarithms of the softmax's sums, `totals` ``[B, T, H]``.

    `q` ``[B, T, H, D]``, `k`, `v` ``[B, S, G, D]``, `chosen`, `weights` ``[B, T, C]``.
    """
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, d, u = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BU)
    own, channel = h < H // G, (d < D)[None, :]
    head = row * H + g * (H // G) + h
    query = tl.load(q + head[:, None] * D + d[None, :], mask=own[:, None] & channel, other=0.0)
    mixed = tl.zeros([BH, BD], tl.float32)
    # The null chunk: U tokens of logit 0 and value 0.
    largest = tl.zeros([BH], tl.float32) if WEIGHTED else tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32) + (U if WEIGHTED else 0)
    for slot in range(C):
        index = tl.load(chosen + row * C + slot).to(tl.int64)
        weight = tl.load(weights + row * C + slot).to(tl.float32) if WEIGHTED else 0.0
        for first in range(0, U, BU):
            token = first + u
            seen = token < tl.where(index < 0, 0, U)
            place = chunk_rows(row // T, index, token, g, S, G, D, U)[:, None] + d[None, :]
            key = tl.load(k + place, mask=seen[:, None] & channel, other=0.0)
            value = tl.load(v + place, mask=seen[:, None] & channel, other=0.0)
            logits = product(query, tl.trans(key), tl.zeros([BH, BU], tl.float32), DOT, UPCAST, PRECISION)
            logits = tl.where(seen[None, :], logits * scale + weight, float("-inf"))
            largest, total, mixed = softmax_step(logits, value, largest, total, mixed, DOT, UPCAST, PRECISION)
    none = total == 0
    total = tl.where(none, 1.0, total)
    mixed /= total[:, None]
    tl.store(out + head[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=own[:, None] & channel)
    tl.store(totals + head, tl.where(none, 0.0, largest) + tl.log(total), mask=own)


@kernel
def attend_rows_kernel(
    q, k, v, chosen, weights, out, totals, scale, R, T, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The same for BR tokens, of all R in all rows of the batch, and one query head; short chunks."""
    row, h = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1)
    d, g = tl.arange(0, BD), h // (H // G)
    inside, channel = row < R, (d < D)[None, :]
    head = row * H + h
    query = tl.load(q + head[:, None] * D + d[None, :], mask=inside[:, None] & channel, other=0.0).to(tl.float32)
    query *= scale
    mixed = tl.zeros([BR, BD], tl.float32)
    largest = tl.zeros([BR], tl.float32) if WEIGHTED else tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32) + (U if WEIGHTED else 0)
    for slot in range(C):
        index = tl.load(chosen + row * C + slot, mask=inside, other=-1).to(tl.int64)
        seen = index >= 0
        weight = tl.zeros([BR], tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + row * C + slot, mask=inside, other=0.0).to(tl.float32)
        for token in range(U):
            place = chunk_rows(row // T, index, token, g, S, G, D, U)[:, None] + d[None, :]
            key = tl.load(k + place, mask=seen[:, None] & channel, other=0.0).to(tl.float32)
            value = tl.load(v + place, mask=seen[:, None] & channel, other=0.0).to(tl.float32)
            logits = tl.where(seen, tl.sum(query * key, 1) + weight, float("-inf"))
            larger = tl.maximum(largest, logits)
            # Where no logit has counted yet, -inf - (-inf) would be NaN.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            kept, share = tl.exp(largest - base), tl.exp(logits - base)
            total = total * kept + share
            mixed = mixed * kept[:, None] + share[:, None] * value
            largest = larger
    none = total == 0
    total = tl.where(none, 1.0, total)
    mixed /= total[:, None]
    tl.store(out + head[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=inside[:, None] & channel)
    tl.store(totals + head, tl.where(none, 0.0, largest) + tl.log(total), mask=inside)
