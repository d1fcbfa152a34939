"""Kernels of one decoding step with retrieval: a chunk's vector when it ends, the chosen chunks' embeddings, the blend.

Token ids ``[B, room]``, chunk vectors and the number of tokens read so far ``[B]`` are on the device, so the launches
are the same for every token and can be captured in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embedding(table, token, d, size, eps, kind: tl.constexpr):
    """The embedding of one token, scaled to mean square 1 and rounded to `kind`; as `TokenContext.embed`."""
    row = tl.load(table + token.to(tl.int64) * size + d, mask=d < size, other=0.0).to(tl.float32)
    return (row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)).to(kind).to(tl.float32)


@triton.jit
def _chunk_vector_kernel(
    table, tokens, position, weight, vectors, room, chunks, size, eps,
    E: tl.constexpr, U: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    read = tl.load(position + b) + 1
    # Chunks past the room for whole ones have no place.
    if (read % U == 0) & (read // U <= chunks):
        d, e = tl.arange(0, BD), tl.arange(0, BE)
        kind = vectors.dtype.element_ty
        total = tl.zeros([BD], tl.float32)
        for u in range(U):
            token = tl.load(tokens + b * room + read - U + u)
            total += _embedding(table, token, d, size, eps, kind)
        mean = (total / U).to(kind).to(tl.float32)
        vector = tl.zeros([BE], tl.float32)
        for line in range(E):
            row = tl.load(weight + line * size + d, mask=d < size, other=0.0).to(tl.float32)
            vector = tl.where(e == line, tl.sum(row * mean, 0), vector)
        vector = vector.to(kind).to(tl.float32)
        vector /= tl.maximum(tl.sqrt(tl.sum(vector * vector, 0)), 1e-12)
        place = vectors + (b * chunks + read // U - 1) * E + e
        tl.store(place, vector.to(kind), mask=e < E)


def add_chunk_vector(
    table: Tensor, tokens: Tensor, position: Tensor, weight: Tensor, vectors: Tensor, chunk: int, eps: float
) -> None:
    """Where the token at `position` ``[B]`` is the last of a chunk, write its vector into `vectors` ``[B, N, E]``.

    `table` ``[vocab, d]``, `tokens` int32 ``[B, room]``, `weight` ``[E, d]`` the encoder's, `chunk` U tokens.
    """
    size, width = table.shape[1], weight.shape[0]
    _chunk_vector_kernel[(tokens.shape[0],)](
        table, tokens, position, weight, vectors, tokens.shape[1], vectors.shape[1], size, eps,
        E=width, U=chunk, BE=triton.next_power_of_2(width), BD=triton.next_power_of_2(size),
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip


@triton.jit
def _place_of_best(values, place, count: tl.constexpr):
    """Where the largest of `values` is; of equal ones the first."""
    return tl.min(tl.where(values == tl.max(values, 0), place, count), 0)


@triton.jit
def _read_chunks_kernel(
    table, tokens, candidates, scores, queries, query_row, temperature, out, local, weights, share, room, size, eps,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    u, slot, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    index = tl.load(candidates + b * M + m, mask=m < M, other=-1)
    found = tl.where(index >= 0, tl.load(scores + b * M + m, mask=m < M, other=0.0), float("-inf"))
    # This program's chunk: the best of what is left when the better ones are taken away.
    left = found
    for _better in range(slot):
        left = tl.where(m == _place_of_best(left, m, BM), float("-inf"), left)
    top, place = tl.max(left, 0), _place_of_best(left, m, BM)
    own = tl.where(top > float("-inf"), tl.sum(tl.where(m == place, index, 0), 0), -1)
    # Without a chunk any token: what it gives is never read.
    token = tl.load(tokens + b * room + tl.maximum(own, 0) * U + u)
    row = _embedding(table, tl.maximum(token, 0), d, size, eps, out.dtype.element_ty)
    tl.store(out + ((b * C + slot) * U + u) * size + d, row.to(out.dtype.element_ty), mask=d < size)
    if u == 0:
        tl.store(local + b * C + slot, tl.where(own < 0, -1, slot))
        if WEIGHTED:
            e = tl.arange(0, BE)
            query = tl.load(queries + b * query_row + e, mask=e < E, other=0.0).to(tl.float32)
            norm = tl.maximum(tl.sqrt(tl.sum(query * query, 0)), 1e-12)
            factor = tl.exp(tl.load(temperature).to(tl.float32)) / norm
            tl.store(weights + b * C + slot, tl.where(own < 0, 0.0, top * factor))
            if slot == 0:
                taken, left = m < 0, found
                for _taken in tl.static_range(C):
                    next_best = _place_of_best(left, m, BM)
                    taken = taken | (m == next_best)
                    left = tl.where(m == next_best, float("-inf"), left)
                part = tl.where(index >= 0, tl.exp((found - tl.maximum(tl.max(found, 0), -1e30)) * factor), 0.0)
                every = tl.maximum(tl.sum(part, 0), 1e-30)
                tl.store(share + b, tl.sum(tl.where(taken, part, 0.0), 0) / every)


def read_chunks(
    table: Tensor,
    tokens: Tensor,
    candidates: Tensor,
    scores: Tensor,
    queries: Tensor,
    temperature: Tensor | None,
    count: int,
    chunk: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The scaled embeddings of the `count` best chunks' tokens ``[B, C * U, d]``, their numbers there, their logits.

    `candidates` int64, `scores` float32 ``[B, 1, M]``: products with `queries` ``[B, E]``, which need not have norm 1.
    Returns also numbers int32 and logits float32 ``[B, 1, C]``, and the chosen chunks' share among the candidates
    ``[B]``; neither logits nor share without a `temperature` ``[1]`` (its logarithm).
    """
    (rows, _, offered), size, width = candidates.shape, table.shape[1], queries.shape[1]
    count = min(count, offered)
    out = table.new_empty((rows, count * chunk, size))
    local = tokens.new_empty((rows, 1, count))
    weights = None if temperature is None else scores.new_empty((rows, 1, count))
    share = None if temperature is None else scores.new_empty(rows)
    _read_chunks_kernel[(chunk, count, rows)](
        table, tokens, candidates, scores, queries, queries.stride(0), scores if temperature is None else temperature,
        out, local, scores if weights is None else weights, scores if share is None else share, tokens.shape[1], size,
        eps, C=count, M=offered, BM=triton.next_power_of_2(offered), U=chunk, E=width,
        BE=triton.next_power_of_2(width), BD=triton.next_power_of_2(size), WEIGHTED=weights is not None,
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return out, local, weights, share


@triton.jit
def _blend_kernel(
    y, y_row, found, found_share, position, part, part_row, bias, alpha, out, size,
    U: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    inside = d < size
    mixed = tl.load(y + b * y_row + d, mask=inside, other=0.0).to(tl.float32)
    read = tl.load(found + b * size + d, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        read *= tl.load(found_share + b)
    share = tl.zeros([BD], tl.float32) + alpha
    if BIAS:
        share = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    if PART:
        share += tl.load(part + b * part_row + d, mask=inside, other=0.0).to(tl.float32)
    both = share * mixed + (1.0 - share) * read
    result = tl.where(tl.load(position + b) >= U, both, mixed)
    tl.store(out + b * size + d, result.to(out.dtype.element_ty), mask=inside)


def blend(
    y: Tensor,
    found: Tensor,
    share: Tensor | None,
    position: Tensor,
    chunk: int,
    alpha: float,
    bias: Tensor | None,
    part: Tensor | None,
) -> Tensor:
    """alpha * y + (1 - alpha) * share * found ``[B, d]`` for rows that have read a whole chunk, y for the others.

    `share` ``[B]``; None = 1. alpha is `bias` ``[d]``, where there is one, plus `part` ``[B, d]``, where there is one.
    """
    rows, size = y.shape
    out = y.new_empty((rows, size))
    columns = min(1024, triton.next_power_of_2(size))
    _blend_kernel[(triton.cdiv(size, columns), rows)](
        y, y.stride(0), found.contiguous(), y if share is None else share, position, y if part is None else part,
        0 if part is None else part.stride(0), y if bias is None else bias, alpha, out, size,
        U=chunk, SHARED=share is not None, BIAS=bias is not None, PART=part is not None, BD=columns, num_warps=4,
    )  # fmt: skip
    return out
