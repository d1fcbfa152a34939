"""Kernels of one decoding step with retrieval: the choice of chunks, their keys and values, the blend.

Token ids ``[B, room]``, chunk vectors and the number of tokens read so far ``[B]`` are on the device, so the launches
are the same for every token and can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.triton.launch import arithmetic, kernel, product, product_block
from longrecall.ops.triton.small_products import small_product


@triton.jit
def _embedding(table, token, d, size, eps, kind: tl.constexpr):
    """The embedding of one token, scaled to mean square 1 and rounded to `kind`; as `TokenContext.embed`."""
    row = tl.load(table + token.to(tl.int64) * size + d, mask=d < size, other=0.0).to(tl.float32)
    return (row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)).to(kind).to(tl.float32)


@triton.jit
def _chunk_vector(
    table, tokens, read, weight, vectors, b, room, chunks, size, eps,
    E: tl.constexpr, U: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Where `read` tokens end a chunk, its vector. Chunks past the room for whole ones have no place."""
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


@triton.jit
def _merged(best, index, found, number, slot, n, BC: tl.constexpr):
    """The best of a descending list `best` of chunks `index` and of a block `found` of later ones, by their ranks."""
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
    table, tokens, position, weight, vectors, queries, query_row, temperature, chosen, local, weights, share,
    room, chunks, size, eps,
    C: tl.constexpr, TOP: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    at = tl.load(position + b)
    if tl.program_id(1) == 1:
        # It ends before the next token only: the program beside this one does not read it.
        _chunk_vector(table, tokens, at + 1, weight, vectors, b, room, chunks, size, eps, E, U, BE, BD)
    else:
        slot, n, e = tl.arange(0, BC), tl.arange(0, BN), tl.arange(0, BE)
        query = tl.load(queries + b * query_row + e, mask=e < E, other=0.0).to(tl.float32)
        ended = tl.minimum(at // U, chunks).to(tl.int32)
        best, index = tl.full([BC], float("-inf"), tl.float32), tl.full([BC], -1, tl.int32)
        for first in range(0, ended, BN):
            number = first + n
            inside = (number < ended)[:, None] & (e < E)[None, :]
            vector = tl.load(vectors + (b * chunks + number)[:, None] * E + e[None, :], mask=inside, other=0.0)
            found = tl.where(number < ended, tl.sum(vector.to(tl.float32) * query[None, :], 1), float("-inf"))
            best, index = _merged(best, index, found, number, slot, n, BC)
        tl.store(chosen + b * TOP + slot, index, mask=slot < TOP)
        tl.store(local + b * TOP + slot, tl.where(index < 0, -1, slot), mask=slot < TOP)
        if WEIGHTED:
            norm = tl.maximum(tl.sqrt(tl.sum(query * query, 0)), 1e-12)
            factor = tl.exp(tl.load(temperature).to(tl.float32)) / norm
            tl.store(weights + b * TOP + slot, tl.where(index < 0, 0.0, best * factor), mask=slot < TOP)
            top = tl.maximum(tl.max(best, 0), -1e30)
            part = tl.where((index >= 0) & (slot < C), tl.exp((best - top) * factor), 0.0)
            every = tl.maximum(tl.sum(part, 0), 1e-30)
            tl.store(share + b, tl.sum(tl.where(slot < TOP, part, 0.0), 0) / every)


def choose(
    table: Tensor,
    tokens: Tensor,
    position: Tensor,
    weight: Tensor,
    vectors: Tensor,
    queries: Tensor,
    temperature: Tensor | None,
    chunk: int,
    candidates: int,
    count: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The best `count` of the chunks that end before the token at `position` ``[B]``, and the vector of its own chunk.

    Where that token is the last of a chunk, the chunk's vector goes into `vectors` ``[B, N, E]``. `table`
    ``[vocab, d]``, `tokens` int32 ``[B, room]``, `weight` ``[E, d]`` the encoder's, `queries` ``[B, E]`` of any norm.

    Returns:
        Chunks int32 ``[B, C]``, the best first and -1 = none; their numbers among the chosen ``[B, 1, C]``; with a
        `temperature` ``[1]`` (its logarithm) their logits float32 ``[B, 1, C]`` and their share among the best
        `candidates` ``[B]``.
    """
    rows, (chunks, width), size = tokens.shape[0], vectors.shape[1:], table.shape[1]
    candidates = min(candidates, chunks)
    count = min(count, candidates)
    chosen, local = tokens.new_empty((rows, count)), tokens.new_empty((rows, 1, count))
    weights = None if temperature is None else queries.new_empty((rows, 1, count), dtype=torch.float32)
    share = None if temperature is None else queries.new_empty(rows, dtype=torch.float32)
    _choose_kernel[(rows, 2)](
        table, tokens, position, weight, vectors, queries, queries.stride(0),
        queries if temperature is None else temperature, chosen, local, queries if weights is None else weights,
        queries if share is None else share, tokens.shape[1], chunks, size, eps,
        C=candidates, TOP=count, U=chunk, E=width, BC=triton.next_power_of_2(candidates), BN=64,
        BE=triton.next_power_of_2(width), BD=triton.next_power_of_2(size), WEIGHTED=temperature is not None,
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return chosen, local, weights, share


@kernel
def _keys_values_kernel(
    table, tokens, chosen, key_weight, value_weight, keys, values, room, size, eps,
    COUNT: tl.constexpr, U: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    m, n, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    inside = m < COUNT * U
    own = tl.load(chosen + b * COUNT + m // U, mask=inside, other=0)
    # Without a chunk any token: what it gives is never read.
    token = tl.load(tokens + b * room + tl.maximum(own, 0) * U + m % U, mask=inside, other=0)
    rows = table + tl.maximum(token, 0).to(tl.int64)[:, None] * size
    squares = tl.zeros([BM], tl.float32)
    key, value = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for first in range(0, size, BD):
        column = (first + d)[None, :]
        x = tl.load(rows + column, mask=inside[:, None] & (column < size), other=0.0)
        weight = n[:, None] * size + column
        given = (n < WIDTH)[:, None] & (column < size)
        to_key = tl.load(key_weight + weight, mask=given, other=0.0)
        to_value = tl.load(value_weight + weight, mask=given, other=0.0)
        key = product(x, tl.trans(to_key), key, DOT, UPCAST, PRECISION)
        value = product(x, tl.trans(to_value), value, DOT, UPCAST, PRECISION)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    # To mean square 1 after the products instead of before: one pass, and a rounding less than in the layer.
    scale = tl.rsqrt(squares / size + eps)[:, None]
    place = (b * COUNT * U + m)[:, None] * WIDTH + n[None, :]
    stored = inside[:, None] & (n < WIDTH)[None, :]
    tl.store(keys + place, (key * scale).to(keys.dtype.element_ty), mask=stored)
    tl.store(values + place, (value * scale).to(values.dtype.element_ty), mask=stored)


def keys_and_values(
    table: Tensor, tokens: Tensor, chosen: Tensor, weights: tuple[Tensor, Tensor], chunk: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, C * U, P]`` of the tokens of the chunks `chosen` int32 ``[B, C]`` of U = `chunk` tokens.

    `table` ``[vocab, d]``, `tokens` int32 ``[B, room]``, `weights` two of ``[P, d]``. Embeddings are scaled to mean
    square 1, as by `TokenContext.embed`. For chunks -1 what is returned is unspecified.
    """
    (rows, count), (columns, size) = chosen.shape, weights[0].shape
    keys, values = (table.new_empty((rows, count * chunk, columns)) for _ in range(2))
    # Wide operands take more registers.
    narrow = table.dtype == torch.bfloat16
    BN, BD = product_block(columns, 64, table.dtype), product_block(size, 128 if narrow else 32, table.dtype)
    _keys_values_kernel[(triton.cdiv(count * chunk, 16), triton.cdiv(columns, BN), rows)](
        table, tokens, chosen, *weights, keys, values, tokens.shape[1], size, eps,
        COUNT=count, U=chunk, WIDTH=columns, BM=16, BN=BN, BD=BD, num_warps=4,
        num_stages=3 if narrow else 1, **arithmetic(table.dtype).constants(),
    )  # fmt: skip
    return keys, values


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
    BD: tl.constexpr,
):  # fmt: skip
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

    `position` ``[B]``: tokens read before that of the row; a number: rows are those of texts of that length, one after
    the other. `share` ``[B]``; None = 1. alpha is `bias` ``[d]`` or, without one, the number, plus `part` ``[B, d]``,
    where there is one.
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
    y, y_row, y_weight, y_size, found, found_weight, found_size, found_share, position, part, part_row, bias, alpha,
    stream, count,
    U: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < count
    kind = y_weight.dtype.element_ty
    mixed = small_product(y + b * y_row, y, 1.0, y_weight, n, count, y_size, False, BN, BD).to(kind).to(tl.float32)
    found += b * found_size
    read = small_product(found, y, 1.0, found_weight, n, count, found_size, False, BN, BD).to(kind).to(tl.float32)
    if SHARED:
        read *= tl.load(found_share + b)
    read_any = tl.load(position + b) >= U
    result = _blended(mixed, read, bias, part + b * part_row, alpha, n, inside, read_any, BIAS, PART)
    place = stream + b * count + n
    before = tl.load(place, mask=inside, other=0.0)
    tl.store(place, (before.to(tl.float32) + result.to(kind).to(tl.float32)).to(before.dtype), mask=inside)


def add_blended_products(
    stream: Tensor,
    y: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor],
    share: Tensor | None,
    position: Tensor,
    chunk: int,
    alpha: float,
    bias: Tensor | None,
    part: Tensor | None,
) -> None:
    """stream ``[B, d]`` += `blend` of two products, in place, for a handful of rows.

    `y` and `found` are each an input ``[B, n]`` and a weight ``[d, n]``, for n of their own; the rest as in `blend`.
    """
    (rows, size), like = stream.shape, y[0]
    read = found[0].contiguous()
    _blend_products_kernel[(triton.cdiv(size, 4), rows)](
        like, like.stride(0), y[1], like.shape[1], read, found[1], read.shape[1], like if share is None else share,
        position, like if part is None else part, 0 if part is None else part.stride(0),
        like if bias is None else bias, alpha, stream, size,
        U=chunk, SHARED=share is not None, BIAS=bias is not None, PART=part is not None, BN=4, BD=512, num_warps=4,
    )  # fmt: skip
