"""Kernels of one decoding step with retrieval: the choice of chunks, attention to their tokens, the blend.

Token ids ``[B, room]``, chunk vectors and the number of tokens read so far ``[B]`` are stored on the GPU. So the
launches are the same for every token and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.decoding.triton.products import small_product
from longrecall.ops.kernels.dependent_launch import wait_for_previous
from longrecall.ops.kernels.launch import arithmetic, block, kernel, product, product_block, softmax_step

SPANS = ((1024, 64, 64), (1 << 62, 256, 64))
"""For up to so many chunks: the chunks among which a program chooses, and how many it compares at a time."""

READ_AT_ONCE = 256
"""The most tokens of the chosen chunks whose keys and values are loaded at a time."""


@triton.jit
def _chunk_vector(
    table, tokens, read, weight, vectors, b, room, chunks, size, eps,
    E: tl.constexpr, U: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store the vector of the chunk that ends after `read` tokens, if one does and there is a place for it."""
    if (read % U == 0) & (read // U <= chunks):
        d, e, line = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BL)
        kind = vectors.dtype.element_ty
        total = tl.zeros([BD], tl.float32)
        for first in range(0, U, BL):
            token = tl.load(tokens + b * room + read - U + first + line, mask=first + line < U, other=0)
            inside = (first + line < U)[:, None] & (d < size)[None, :]
            x = tl.load(table + token.to(tl.int64)[:, None] * size + d[None, :], mask=inside, other=0.0)
            x = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
            total += tl.sum((x * scale[:, None]).to(kind).to(tl.float32), 0)
        mean = (total / U).to(kind).to(tl.float32)
        vector = tl.zeros([BE], tl.float32)
        for start in range(0, E, BL):
            own = start + line
            inside = (own < E)[:, None] & (d < size)[None, :]
            rows = tl.load(weight + own[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32)
            part = tl.sum(rows * mean[None, :], 1)
            vector += tl.sum(tl.where(e[:, None] == own[None, :], part[None, :], 0.0), 1)
        vector = vector.to(kind).to(tl.float32)
        vector /= tl.maximum(tl.sqrt(tl.sum(vector * vector, 0)), 1e-12)
        place = vectors + (b * chunks + read // U - 1) * E + e
        tl.store(place, vector.to(kind), mask=e < E)


@triton.jit
def _merged(best, index, found, number, slot, n, BC: tl.constexpr):
    """Merge a descending list `best` of chunks `index` with a block `found` of later chunks: the best of both."""
    ahead = (found[:, None] > found[None, :]) | ((found[:, None] == found[None, :]) & (n[:, None] < n[None, :]))
    older = best[:, None] >= found[None, :]
    rank = tl.sum(ahead.to(tl.int32), 0) + tl.sum(older.to(tl.int32), 0)
    own = slot + tl.sum((best[:, None] < found[None, :]).to(tl.int32), 1)
    kept, new = own[None, :] == slot[:, None], rank[None, :] == slot[:, None]
    low = float("-inf")
    merged = tl.maximum(tl.max(tl.where(kept, best[None, :], low), 1), tl.max(tl.where(new, found[None, :], low), 1))
    chunk = tl.maximum(tl.max(tl.where(kept, index[None, :], -1), 1), tl.max(tl.where(new, number[None, :], -1), 1))
    return merged, tl.where(merged > low, chunk, -1)


@kernel
def _choose_kernel(
    table, tokens, position, weight, vectors, queries, query_row, scores, numbers,
    room, chunks, size, eps,
    U: tl.constexpr, E: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_previous(EARLY)
    b = tl.program_id(0).to(tl.int64)
    at = tl.load(position + b)
    if tl.program_id(1) == 0:
        # This chunk may be read from the next token on, so no other program of this launch reads its vector.
        _chunk_vector(table, tokens, at + 1, weight, vectors, b, room, chunks, size, eps, E, U, BE, BD, BL)
    else:
        part = tl.program_id(1) - 1
        ended = tl.minimum(at // U, chunks).to(tl.int32)
        if part * SPAN < ended:
            slot, n, e = tl.arange(0, BC), tl.arange(0, BN), tl.arange(0, BE)
            query = tl.load(queries + b * query_row + e, mask=e < E, other=0.0).to(tl.float32)
            best, index = tl.full([BC], float("-inf"), tl.float32), tl.full([BC], -1, tl.int32)
            for first in range(part * SPAN, tl.minimum((part + 1) * SPAN, ended), BN):
                number = first + n
                inside = (number < ended)[:, None] & (e < E)[None, :]
                vector = tl.load(vectors + (b * chunks + number)[:, None] * E + e[None, :], mask=inside, other=0.0)
                found = tl.where(number < ended, tl.sum(vector.to(tl.float32) * query[None, :], 1), float("-inf"))
                best, index = _merged(best, index, found, number, slot, n, BC)
            place = (b * (tl.num_programs(1) - 1) + part) * BC + slot
            tl.store(scores + place, best)
            tl.store(numbers + place, index)


class Choice(NamedTuple):
    """The best chunks of every span of chunks: one list per span, in descending order, not yet merged."""

    scores: Tensor
    """Products with the query, float32 ``[B, spans, slots]``."""
    numbers: Tensor
    """The chunks, int32 of the same shape; -1 = none. Lists of spans in which no chunk has ended are not written."""
    span: int
    """Chunks of a span."""
    candidates: int
    """Slots that are used of every list, and of the merged list."""


def choose(
    table: Tensor,
    tokens: Tensor,
    position: Tensor,
    weight: Tensor,
    vectors: Tensor,
    queries: Tensor,
    chunk: int,
    candidates: int,
    eps: float,
) -> Choice:
    """The best of the chunks that end before the token at `position` ``[B]``, and the vector of its own chunk.

    If that token is the last of a chunk, the vector of the chunk is stored in `vectors` ``[B, N, E]``. `table`
    ``[vocab, d]``: embeddings. `tokens`: int32 ``[B, room]``. `weight` ``[E, d]``: the encoder's. `queries` ``[B, E]``
    have any norm. There is a program for every span of chunks; those of spans without an ended chunk do nothing.
    """
    rows, (chunks, width), size = tokens.shape[0], vectors.shape[1:], table.shape[1]
    candidates = min(candidates, chunks)
    span, together = next(sizes for most, *sizes in SPANS if chunks <= most)
    spans, slots = triton.cdiv(chunks, span), triton.next_power_of_2(candidates)
    scores = queries.new_empty((rows, spans, slots), dtype=torch.float32)
    numbers = tokens.new_empty((rows, spans, slots))
    columns = triton.next_power_of_2(size)
    _choose_kernel[(rows, spans + 1)](
        table, tokens, position, weight, vectors, queries, queries.stride(0), scores, numbers,
        tokens.shape[1], chunks, size, eps,
        U=chunk, E=width, SPAN=span, BC=slots, BN=together, BE=triton.next_power_of_2(width), BD=columns,
        BL=max(1, 8192 // columns), num_warps=4 if size <= 4096 and together <= 128 else 8,
    )  # fmt: skip
    return Choice(scores, numbers, span, candidates)


@triton.jit
def _ranks(scores, score, m, used, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr):
    """The rank of every candidate `score` ``[BP]`` among the candidates of the first `used` lists in `scores`."""
    rank = tl.zeros([BP], tl.int32)
    for first in range(0, used * BC, BO):
        o = first + tl.arange(0, BO)
        other = tl.load(scores + o, mask=(o < used * BC) & (o % BC < C), other=float("-inf"))
        # Earlier lists hold earlier chunks, which come first among equal scores.
        ahead = (other[None, :] > score[:, None]) | ((other[None, :] == score[:, None]) & (o[None, :] < m[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    return rank


@triton.jit
def _chosen(score, number, rank, factor, first, token, TOP: tl.constexpr, U: tl.constexpr, BM: tl.constexpr):
    """The chunks, and their logits, of tokens `first` to `first` + BM of the TOP * U that are read."""
    chunk, logit = tl.full([BM], -1, tl.int32), tl.zeros([BM], tl.float32)
    for slot in range(first // U, tl.minimum(TOP, (first + BM - 1) // U + 1)):
        own = (rank == slot) & (number >= 0)
        here = (first + token) // U == slot
        chunk = tl.where(here, tl.max(tl.where(own, number, -1), 0), chunk)
        logit = tl.where(here, tl.sum(tl.where(own, score, 0.0), 0) * factor, logit)
    return chunk, logit


@kernel
def _read_kernel(
    q, q_row, queries, query_row, temperature, position, scores, numbers, tokens, memory, out,
    room, chunks, spans, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, U: tl.constexpr, C: tl.constexpr,
    TOP: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BO: tl.constexpr, WEIGHTED: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    """One row and key head: the lists merged, and attention to the tokens of the TOP best chunks."""
    wait_for_previous(EARLY)
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, d, token, m, e = (
        tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BP), tl.arange(0, BE),
    )  # fmt: skip
    ended = tl.minimum(tl.load(position + b) // U, chunks).to(tl.int32)
    used = tl.cdiv(ended, SPAN)
    scores += b * spans * BC
    there = (m // BC < used) & (m % BC < C)
    score = tl.load(scores + m, mask=there, other=float("-inf"))
    number = tl.load(numbers + b * spans * BC + m, mask=there, other=-1)
    rank = _ranks(scores, score, m, used, C, BC, BP, BO)
    own, channel = h < H // G, (d < D)[None, :]
    head = g * (H // G) + h
    query = tl.load(q + b * q_row + head[:, None] * D + d[None, :], mask=own[:, None] & channel, other=0.0)
    factor, share = 1.0, 1.0
    if WEIGHTED:
        wide = tl.load(queries + b * query_row + e, mask=e < E, other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(wide * wide, 0)), 1e-12)
        factor = tl.exp(tl.load(temperature).to(tl.float32)) / norm
        top = tl.maximum(tl.max(score, 0), -1e30)
        part = tl.where((number >= 0) & (rank < C), tl.exp((score - top) * factor), 0.0)
        share = tl.sum(tl.where(rank < TOP, part, 0.0), 0) / tl.maximum(tl.sum(part, 0), 1e-30)
    mixed = tl.zeros([BH, BD], tl.float32)
    # The null chunk: U tokens of logit 0 and value 0.
    largest = tl.zeros([BH], tl.float32) if WEIGHTED else tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32) + (U if WEIGHTED else 0)
    for first in range(0, TOP * U, BM):
        chunk, weight = _chosen(score, number, rank, factor, first, token, TOP, U, BM)
        seen = chunk >= 0
        place = b * room + tl.maximum(chunk, 0) * U + (first + token) % U
        row = tl.load(tokens + place, mask=seen, other=0).to(tl.int64)
        row = memory + (tl.maximum(row, 0) * (2 * G) + g) * D
        inside = seen[:, None] & channel
        key = tl.load(row[:, None] + d[None, :], mask=inside, other=0.0)
        value = tl.load(row[:, None] + G * D + d[None, :], mask=inside, other=0.0)
        logits = product(query, tl.trans(key), tl.zeros([BH, BM], tl.float32), DOT, UPCAST, PRECISION)
        logits = logits * scale
        if WEIGHTED:
            logits += weight[None, :]
        logits = tl.where(seen[None, :], logits, float("-inf"))
        largest, total, mixed = softmax_step(logits, value, largest, total, mixed, DOT, UPCAST, PRECISION)
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    kind = out.dtype.element_ty
    # Rounded at the same place as in the layer.
    mixed = mixed.to(kind).to(tl.float32) * share
    tl.store(out + (b * H + head[:, None]) * D + d[None, :], mixed.to(kind), mask=own[:, None] & channel)


def read(
    q: Tensor,
    queries: Tensor,
    temperature: Tensor | None,
    position: Tensor,
    choice: Choice,
    tokens: Tensor,
    memory: Tensor,
    chunk: int,
    count: int,
    chunks: int,
) -> Tensor:
    """What each row reads of the `count` best chunks of a choice among `chunks` at most: ``[B, H * P]``.

    q ``[B, H * P]``; `queries` ``[B, E]``: those of the choice; `tokens` int32 ``[B, room]``; `memory`
    ``[vocab, 2, G, P]``: key and value of every token id. With a `temperature` ``[1]`` (its logarithm) the scores of
    the chunks are logits too, and a null chunk competes with them. The result is then multiplied by the share of the
    chosen chunks among all candidates, as in `layers.retrieval.Retrieval`. It is 0 where no chunk has ended.
    """
    rows, (_, _, groups, width), (spans, slots) = q.shape[0], memory.shape, choice.scores.shape[1:]
    heads = q.shape[1] // width
    out = q.new_empty((rows, q.shape[1]))
    narrow = memory.dtype == torch.bfloat16
    columns = product_block(width, 256, memory.dtype)
    entries = triton.next_power_of_2(spans * slots)
    at_once = max(64 if narrow else 32, min(READ_AT_ONCE, (16384 if narrow else 4096) // columns))
    _read_kernel[(rows, groups)](
        q, q.stride(0), queries, queries.stride(0), queries if temperature is None else temperature, position,
        choice.scores, choice.numbers, tokens, memory, out, tokens.shape[1], chunks, spans, width**-0.5,
        H=heads, G=groups, D=width, E=queries.shape[1], U=chunk, C=choice.candidates,
        TOP=min(count, choice.candidates), SPAN=choice.span, BC=slots, BP=entries,
        BE=triton.next_power_of_2(queries.shape[1]), BH=block(heads // groups, 128),
        BM=min(at_once, product_block(count * chunk, 256, memory.dtype)), BD=columns,
        BO=min(entries, max(slots, 4096 // entries)),
        WEIGHTED=temperature is not None, num_warps=4, num_stages=1, **arithmetic(memory.dtype).constants(),
    )  # fmt: skip
    return out


@triton.jit
def _blended(mixed, read, bias, part, alpha, d, inside, read_any, BIAS: tl.constexpr, PART: tl.constexpr):
    """alpha * mixed + (1 - alpha) * read where a chunk has been read, `mixed` elsewhere."""
    share = tl.zeros_like(mixed) + alpha
    if BIAS:
        share = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    if PART:
        share += tl.load(part + d, mask=inside, other=0.0).to(tl.float32)
    return tl.where(read_any, share * mixed + (1.0 - share) * read, mixed)


@kernel
def _blend_kernel(
    y, y_row, found, found_share, position, length, part, part_row, bias, alpha, out, size,
    U: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, GIVEN: tl.constexpr,
    BD: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_previous(EARLY)
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = d < size
    mixed = tl.load(y + b * y_row + d, mask=inside, other=0.0).to(tl.float32)
    read = tl.load(found + b * size + d, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        read *= tl.load(found_share + b)
    at = tl.load(position + b) if GIVEN else b % length
    read_any = at >= U
    result = _blended(mixed, read, bias, part + b * part_row, alpha, d, inside, read_any, BIAS, PART)
    tl.store(out + b * size + d, result.to(out.dtype.element_ty), mask=inside)


def blend(
    y: Tensor,
    found: Tensor,
    share: Tensor | None,
    position: Tensor | int,
    chunk: int,
    alpha: float,
    bias: Tensor | None,
    part: Tensor | None,
) -> Tensor:
    """alpha * y + (1 - alpha) * share * found ``[B, d]`` for rows that have read a whole chunk, y for the others.

    `position` ``[B]``: tokens read before the token of each row. If it is a number, the rows are the tokens of texts of
    that length, one text after the other. `share` ``[B]``; None = 1. alpha is `bias` ``[d]`` or, without a bias, the
    given number; `part` ``[B, d]`` is added to it, if there is one.
    """
    rows, size = y.shape
    out = y.new_empty((rows, size))
    given = isinstance(position, Tensor)
    columns = min(1024, triton.next_power_of_2(size))
    _blend_kernel[(rows, triton.cdiv(size, columns))](
        y, y.stride(0), found.contiguous(), y if share is None else share,
        position if given else y, 1 if given else position, y if part is None else part,
        0 if part is None else part.stride(0), y if bias is None else bias, alpha, out, size,
        U=chunk, SHARED=share is not None, BIAS=bias is not None, PART=part is not None, GIVEN=given,
        BD=columns, num_warps=4,
    )  # fmt: skip
    return out


@kernel
def _blend_products_kernel(
    y, y_row, y_weight, y_size, found, found_weight, found_size, position, part, part_row, bias, alpha,
    stream, count,
    U: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_previous(EARLY)
    b = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < count
    kind = y_weight.dtype.element_ty
    mixed = small_product(y + b * y_row, y_weight, n, count, y_size, BD).to(kind).to(tl.float32)
    found += b * found_size
    read = small_product(found, found_weight, n, count, found_size, BD).to(kind).to(tl.float32)
    read_any = tl.load(position + b) >= U
    result = _blended(mixed, read, bias, part + b * part_row, alpha, n, inside, read_any, BIAS, PART)
    place = stream + b * count + n
    before = tl.load(place, mask=inside, other=0.0)
    tl.store(place, (before.to(tl.float32) + result.to(kind).to(tl.float32)).to(before.dtype), mask=inside)


def add_blended_products(
    stream: Tensor,
    y: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor],
    position: Tensor,
    chunk: int,
    alpha: float,
    bias: Tensor | None,
    part: Tensor | None,
) -> None:
    """stream ``[B, d]`` += `blend` of two products, in place, for a handful of rows.

    `y` and `found` are pairs of an input ``[B, n]`` and a weight ``[d, n]``; n may differ. All else is as in `blend`.
    """
    (rows, size), like = stream.shape, y[0]
    read = found[0].contiguous()
    _blend_products_kernel[(triton.cdiv(size, 4), rows)](
        like, like.stride(0), y[1], like.shape[1], read, found[1], read.shape[1], position,
        like if part is None else part, 0 if part is None else part.stride(0),
        like if bias is None else bias, alpha, stream, size,
        U=chunk, BIAS=bias is not None, PART=part is not None, BN=4, BD=512, num_warps=4,
    )  # fmt: skip
