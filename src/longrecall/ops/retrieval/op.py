"""The choice of chunks, and attention over the chosen ones only. Queries that chose one chunk share its keys.

`ops/retrieval/reference.py` is the definition of the attention. On a GPU kernels do both (`triton/retrieval.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longrecall.ops.backends import CHUNKED, REFERENCE, Op, declare, kernel, never_slow
from longrecall.ops.shapes import accumulation_dtype

QUERY_BLOCK = 512
"""Queries that are compared with all chunks at a time: their scores [512, S / chunk] need most memory of a choice."""

WIDEST_BLOCK = 64
"""The most queries of one chunk in one matrix."""

GATHERED_NUMBERS = {"cpu": 1 << 18}
"""The most numbers of a batch of blocks: what fits into the cache of a CPU core."""

GATHERED_ELSEWHERE = 1 << 26
"""The same on a GPU, where few large kernels win."""


SELECTED_ATTENTION, BEST_CHUNKS = (
    declare(Op(name, kernels="retrieval.triton.retrieval", plain=(REFERENCE, CHUNKED), slow=never_slow))
    for name in ("selected_attention", "best_chunks")
)

_selected_attention_kernels = kernel("retrieval.triton.retrieval", "selected_attention")
_best_chunks_kernels = kernel("retrieval.triton.retrieval", "best_chunks")


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Tensor,
    weights: Tensor | None,
    chunk: int,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of every query over the tokens of the chunks chosen for it.

    Source: RESONA, section 3.1 and algorithm 3; `weights` and their null chunk are ours, see
    `reference.selected_attention` for the formula. Time is O(T * C * chunk), memory O(T * C + S): no weights of single
    tokens are kept for the backward pass, which computes them again. It cannot be differentiated twice.

    Args:
        q: ``[B, T, H, P]``.
        k, v: ``[B, S, G, P]``; G divides H and query head h reads head ``h // (H / G)``. Chunk c is tokens
            ``c * chunk`` to ``(c + 1) * chunk - 1``; tokens after the last whole chunk are never read.
        chunks: integers ``[B, T, C]``, all different for a query; -1 = none. They carry no gradient.
        weights: logits of the chosen chunks ``[B, T, C]``, or None for the plain softmax.
        chunk: tokens of a chunk.
        scale: factor of the logits; None = ``P ** -0.5``.
        backend: "triton" for the kernels, another name for plain torch; None chooses.

    Returns:
        ``[B, T, H, P]`` in the dtype of `v`; 0 where a query has no chunk. Softmax in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit together, an unknown backend, or one that cannot serve this call.

    >>> q = k = torch.zeros(1, 4, 1, 2)
    >>> v = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 2)
    >>> chunks = torch.tensor([[[-1], [-1], [0], [0]]])           # the last two queries read tokens 0 and 1
    >>> selected_attention(q, k, v, chunks, None, chunk=2)[0, :, 0, 0]
    tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """
    _check(q, k, v, chunks, weights, chunk)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    whole = k.shape[1] // chunk
    if chunks.shape[2] == 0 or whole == 0:
        return torch.zeros_like(q, dtype=v.dtype)
    # Under autocast the inputs may differ in dtype; that of the values is used.
    q, k = q.to(v.dtype), k.to(v.dtype)
    with torch.autocast(v.device.type, enabled=False):
        if SELECTED_ATTENTION.on_kernels({"q": q, "k": k, "v": v}, backend):
            result: Tensor = _selected_attention_kernels(q, k, v, chunks, weights, chunk, scale)
            return result
        k, v = k[:, : whole * chunk], v[:, : whole * chunk]
        result = _SelectedAttention.apply(q, k, v, chunks.long(), weights, chunk, scale)
    return result


def best_chunks(
    queries: Tensor,
    vectors: Tensor,
    finished: Tensor,
    count: int,
    *,
    reach: tuple[int, int] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The chunks of largest product with each query, among those that have ended before it.

    Source: RESONA, section 3.1 and algorithm 2. Gradients of the scores reach `queries` and `vectors`; the choice has
    none. Of equal scores any may be chosen. Memory is O(T + N).

    Args:
        queries: ``[B, T, E]``.
        vectors: ``[B, N, E]``, of the chunks in the order of the text.
        finished: int64 ``[B, T]``: only the first so many chunks may be chosen.
        count: chunks to choose; all N where there are fewer.
        reach: (a, u) promises that ``finished[:, i]`` is at most ``(a + i + 1) // u``, to save time; None = nothing.
        backend: "triton" for the kernels, another name for plain torch; None chooses.

    Returns:
        int64 ``[B, T, C]`` with C = min(count, N), -1 = none, and their products in float32 (float64 for float64), 0
        for none.

    Raises:
        ValueError: shapes that do not fit together, an unknown backend, or one that cannot serve this call.

    >>> vectors = torch.eye(3)[None]                              # three chunks
    >>> queries = torch.tensor([[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]])
    >>> chosen, scores = best_chunks(queries, vectors, torch.tensor([[2, 3]]), 1)
    >>> chosen[0, :, 0]                                           # the third chunk has not ended before the first query
    tensor([1, 2])
    """
    if queries.dim() != 3 or vectors.dim() != 3 or queries.shape[::2] != vectors.shape[::2] or count < 1:
        raise ValueError(
            f"queries [B, T, E] and vectors [B, N, E] must share B and E, and count be 1 or more; got "
            f"{list(queries.shape)}, {list(vectors.shape)}, {count}"
        )
    if finished.shape != queries.shape[:2]:
        raise ValueError(f"finished must be {list(queries.shape[:2])}; got {list(finished.shape)}")
    count = min(count, vectors.shape[1])
    wide = accumulation_dtype(queries, vectors)
    if not count or not queries.shape[1]:
        shape = (*queries.shape[:2], count)
        return finished.new_zeros(shape), queries.new_zeros(shape, dtype=wide)
    if queries.dtype != vectors.dtype:
        queries, vectors = queries.to(wide), vectors.to(wide)
    with torch.autocast(queries.device.type, enabled=False):
        inputs: dict[str, Tensor | None] = {"queries": queries, "vectors": vectors}
        inputs["chosen"] = finished.new_empty((0, count), dtype=torch.int32)
        if BEST_CHUNKS.on_kernels(inputs, backend):
            chunks, scores = _best_chunks_kernels(queries, vectors, finished, count)
            return chunks, scores
        chunks, scores = _BestChunks.apply(queries.to(wide), vectors.to(wide), finished, count, reach)
    return chunks, scores


class _BestChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, vectors: Tensor, finished: Tensor, count: int, reach: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor]:
        parts, whole = [], vectors.shape[1]
        for start in range(0, queries.shape[1], QUERY_BLOCK):
            part = slice(start, min(start + QUERY_BLOCK, queries.shape[1]))
            most = whole if reach is None else max(count, min(whole, (reach[0] + part.stop) // reach[1]))
            scores = queries[:, part] @ vectors[:, :most].mT
            ahead = torch.arange(most, device=vectors.device) >= finished[:, part, None]
            best, index = scores.masked_fill(ahead, -torch.inf).topk(count, dim=-1)
            absent = best == -torch.inf
            parts.append((index.masked_fill(absent, -1), best.masked_fill(absent, 0.0)))
        chunks, scores = (torch.cat(found, 1) for found in zip(*parts, strict=True))
        ctx.mark_non_differentiable(chunks)
        ctx.save_for_backward(queries, vectors, chunks)
        return chunks, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, vectors, chunks = ctx.saved_tensors
        rows, whole = vectors.shape[:2]
        d_scores = gradients[1].masked_fill(chunks < 0, 0.0)[..., None]
        index = (chunks.clamp(min=0) + torch.arange(rows, device=chunks.device)[:, None, None] * whole).flatten()
        read = vectors.flatten(0, 1).index_select(0, index).view(*chunks.shape, -1)
        d_vectors = torch.zeros_like(vectors).flatten(0, 1)
        d_vectors.index_add_(0, index, (d_scores * queries[:, :, None]).flatten(0, 2))
        return (d_scores * read).sum(2), d_vectors.view_as(vectors), None, None, None


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a query and a chunk chosen for it, ordered by chunk, in blocks of `width` pairs that share a chunk.

    `chunk` ``[blocks]``: the row of `_rows`. `query` ``[blocks, width]``: number of the query in the whole batch.
    `slot` ``[blocks, width]``: number of the choice among those of all queries. `filled` ``[blocks, width]``: whether
    the place holds a pair; where it does not, the other fields repeat a pair. `place` ``[B, T, C]``: the place of each
    choice, `blocks * width` for none.
    """

    chunk: Tensor
    query: Tensor
    slot: Tensor
    filled: Tensor
    place: Tensor

    def batches(self, q: Tensor, k: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
        """Slices of blocks that are computed at a time, and the places of their pairs."""
        blocks, width = self.query.shape
        per_block = chunk * k.shape[2] * k.shape[3] + width * q.shape[2] * (q.shape[3] + chunk)
        size = max(1, GATHERED_NUMBERS.get(k.device.type, GATHERED_ELSEWHERE) // per_block)
        for start in range(0, blocks, size):
            stop = min(start + size, blocks)
            yield slice(start, stop), slice(start * width, stop * width)


def _group(chunks: Tensor, whole: int) -> _Pairs:
    """Order the choices ``[B, T, C]`` among `whole` chunks per row by chunk. Sizes depend on the shapes only."""
    batch, _, slots = chunks.shape
    owners, count, device = batch * whole, chunks.numel(), chunks.device
    first = torch.arange(batch, device=device)[:, None, None] * whole
    owner = (chunks + first).masked_fill(chunks < 0, owners).flatten()
    # Wider blocks share more reads, but the last block of a chunk is half empty on average.
    width = min(WIDEST_BLOCK, 1 << max(0, (count // (4 * max(1, owners))).bit_length() - 1))
    every = torch.arange(count, device=device)
    if width == 1:
        filled, slot = owner < owners, every[:, None]
        place = torch.where(filled, every, count)
        return _Pairs(owner.clamp(max=owners - 1), slot // slots, slot, filled[:, None], place.view(chunks.shape))
    owner, order = owner.sort(stable=True)
    ends = torch.searchsorted(owner, torch.arange(owners, device=device), right=True)
    starts = F.pad(ends[:-1], (1, 0))
    block_ends = ((ends - starts + width - 1) // width).cumsum(0)
    block_starts = F.pad(block_ends[:-1], (1, 0))
    blocks = (count + owners * (width - 1)) // width
    index = torch.arange(blocks, device=device)
    used = torch.minimum(index, block_ends[-1] - 1).clamp(min=0)
    chunk = torch.searchsorted(block_ends, used, right=True).clamp(max=owners - 1)
    within = starts[chunk] + (used - block_starts[chunk]) * width
    rank = within[:, None] + torch.arange(width, device=device)
    filled = (rank < ends[chunk, None]) & (index < block_ends[-1])[:, None]
    slot = order[torch.minimum(rank, ends[chunk, None] - 1).clamp(min=0)]
    to = owner.clamp(max=owners - 1)
    sorted_place = block_starts[to] * width + every - starts[to]
    place = torch.empty_like(order).scatter_(0, order, torch.where(owner < owners, sorted_place, blocks * width))
    return _Pairs(chunk, slot // slots, slot, filled, place.view(chunks.shape))


class _SelectedAttention(torch.autograd.Function):
    """A softmax within each pair; those of a query are merged by their sums into one over all its tokens."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int, scale: float
    ) -> Tensor:
        wide, groups = accumulation_dtype(v), k.shape[2]
        pairs = _group(chunks, k.shape[1] // chunk)
        # One place more than there are pairs, for choices of no chunk.
        logs = q.new_full((pairs.query.numel() + 1, q.shape[2]), -torch.inf, dtype=wide)
        found = v.new_zeros((pairs.query.numel() + 1, *q.shape[2:]))
        for blocks, place in pairs.batches(q, k, chunk):
            keys, values = (_chunk_tokens(y, pairs.chunk[blocks], chunk) for y in (k, v))
            logits = (_queries(q, pairs.query[blocks], groups) @ keys.mT).to(wide) * scale
            largest = logits.amax(-1, keepdim=True)
            shares = logits.sub_(largest).exp_()
            total = shares.sum(-1, keepdim=True)
            logs[place] = _by_pair(largest + total.log(), pairs)[..., 0]
            found[place] = _by_pair(shares.div_(total).to(v.dtype) @ values, pairs)
        logs = logs[pairs.place] if weights is None else logs[pairs.place] + weights.to(wide)[..., None]
        largest = logs.amax(2)
        # The null chunk's logit is 0; without one a query may have no logit at all.
        largest = largest.clamp(min=0.0) if weights is not None else largest.masked_fill(largest == -torch.inf, 0.0)
        shares = (logs - largest[:, :, None]).exp()
        total = shares.sum(2) if weights is None else shares.sum(2) + chunk * (-largest).exp()
        total = torch.where(total == 0, 1.0, total)
        shares = (shares / total[:, :, None])[..., None]
        out = _sum_choices(shares[:, :, c] * found[place] for c, place in enumerate(pairs.place.unbind(2))).to(v.dtype)
        ctx.save_for_backward(q, k, v, chunks, weights, out, largest + total.log())
        ctx.chunk, ctx.scale = chunk, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, chunks, weights, out, logs = ctx.saved_tensors
        groups, wide = k.shape[2], accumulation_dtype(v)
        pairs, d_out = _group(chunks, k.shape[1] // ctx.chunk), gradients[0]
        inner = (d_out.to(wide) * out).sum(-1, keepdim=True)
        shift = -logs[:, :, None] if weights is None else weights.to(wide)[..., None] - logs[:, :, None]
        shift = shift.expand(*chunks.shape, -1).flatten(0, 2)[pairs.slot]
        shift = shift.masked_fill(~pairs.filled[..., None], -torch.inf)[..., None]
        # Many queries choose a key: its gradient is a sum of too many terms for 16 bits.
        d_k, d_v = (torch.zeros_like(_rows(y, ctx.chunk), dtype=wide) for y in (k, v))
        d_q = q.new_zeros((pairs.query.numel() + 1, *q.shape[2:]))
        d_weights = logs.new_zeros(pairs.query.numel() + 1)
        for blocks, place in pairs.batches(q, k, ctx.chunk):
            chosen = pairs.chunk[blocks]
            keys, values = (_chunk_tokens(y, chosen, ctx.chunk) for y in (k, v))
            asked, given, mean = (_queries(y, pairs.query[blocks], groups) for y in (q, d_out, inner))
            shares = (asked @ keys.mT).to(wide) * ctx.scale
            shares = shares.add_(_by_group(shift[blocks], groups)).exp_()
            d_v.index_add_(0, chosen, _as_rows((shares.to(v.dtype).mT @ given).to(wide)))
            change = (given @ values.mT).to(wide).sub(mean).mul_(shares)
            d_weights[place] = _by_pair(change.sum(-1, keepdim=True), pairs).sum((1, 2))
            change = change.mul_(ctx.scale).to(q.dtype)
            d_q[place] = _by_pair(change @ keys, pairs)
            d_k.index_add_(0, chosen, _as_rows((change.mT @ asked).to(wide)))
        d_q = _sum_choices(d_q[place].to(wide) for place in pairs.place.unbind(2)).to(q.dtype)
        d_k, d_v = d_k.view(k.shape).to(k.dtype), d_v.view(v.shape).to(v.dtype)
        return d_q, d_k, d_v, None, None if weights is None else d_weights[pairs.place].to(weights.dtype), None, None


def _sum_choices(terms: Iterable[Tensor]) -> Tensor:
    """Add up one term per choice, one after the other: all terms at once would need most memory of a pass."""
    return functools.reduce(torch.Tensor.add_, terms)


def _rows(x: Tensor, chunk: int) -> Tensor:
    """``[B, S, G, P]`` -> one row for each chunk of each batch, ``[B * S / chunk, chunk * G * P]``."""
    return x.reshape(-1, chunk * x.shape[2] * x.shape[3])


def _chunk_tokens(x: Tensor, index: Tensor, chunk: int) -> Tensor:
    """The tokens of a chunk for each block, ``[blocks, G, chunk, P]``; `_as_rows` turns their gradients back."""
    return _rows(x, chunk).index_select(0, index).view(-1, chunk, *x.shape[2:]).transpose(1, 2)


def _as_rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(1)


def _queries(x: Tensor, index: Tensor, groups: int) -> Tensor:
    """Of ``[B, T, H, X]`` the queries of each block, as `_by_group` has them."""
    return _by_group(x.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, *x.shape[2:]), groups)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """``[blocks, width, H, X]`` -> ``[blocks, G, width * H / G, X]``: one matrix of all that reads a key head."""
    blocks, width, heads, size = x.shape
    return x.view(blocks, width, groups, heads // groups, size).transpose(1, 2).reshape(blocks, groups, -1, size)


def _by_pair(x: Tensor, pairs: _Pairs) -> Tensor:
    """The inverse, with a row per pair: ``[blocks, G, width * H / G, X]`` -> ``[blocks * width, H, X]``."""
    blocks, groups, rows, size = x.shape
    width = pairs.query.shape[1]
    return x.view(blocks, groups, width, rows // width, size).transpose(1, 2).reshape(blocks * width, -1, size)


def _check(q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int) -> None:
    shapes = ", ".join(f"{name} {list(y.shape)}" for name, y in (("q", q), ("k", k), ("v", v), ("chunks", chunks)))
    if any(y.dim() != 4 for y in (q, k, v)) or chunks.dim() != 3:
        raise ValueError(f"q, k, v must be [B, T, H, P] and chunks [B, T, C]; got {shapes}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or chunks.shape[:2] != q.shape[:2]:
        raise ValueError(f"k and v must agree and share B and P with q, chunks B and T; got {shapes}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"the {k.shape[2]} key heads must divide the {q.shape[2]} query heads; got {shapes}")
    if chunk < 1:
        raise ValueError(f"a chunk has at least one token; got {chunk}")
    if chunks.is_floating_point() or (weights is not None and weights.shape != chunks.shape):
        raise ValueError(f"chunks must be integers and weights None or of their shape; got {shapes}")
