"""Retrieval in Triton: the choice of chunks in one pass over all queries, and attention that reads chunks in place.

`ops/retrieval/reference.py` is the definition of the attention. The scores of all chunks are never stored, nor are the
keys and values that a query reads, forward or backward. Nothing waits for the GPU, so a training step can be captured
in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import MOST_ROWS, arithmetic, block, on_device, product_block, why_not_tensors
from longrecall.ops.retrieval.triton import backward as backward_kernels
from longrecall.ops.retrieval.triton import forward as forward_kernels

WIDEST_HEAD = 256
WIDEST_VECTOR = 256
MOST_HEADS = 128
"""The most query heads per key head: they share a program."""
MOST_CHUNKS = 16
"""The most chunks that a query may choose: each takes a pass over the scores of a block."""
SHORTEST_PRODUCT = 16
"""With fewer tokens per chunk, kernels without matrix products are faster."""


def why_not(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    queries: Tensor | None = None,
    vectors: Tensor | None = None,
    chosen: Tensor | None = None,
    **_: Any,
) -> str | None:
    """Why the kernels cannot serve these inputs, in words; None = they can.

    The inputs are q, k and v of the attention, or those of the choice, for which `chosen` is any tensor ``[..., C]``.
    """
    reason = why_not_tensors(*(x for x in (v, queries, vectors) if x is not None))
    if reason:
        return reason
    if q is not None and k is not None:
        if q.shape[3] > WIDEST_HEAD:
            return f"heads are at most {WIDEST_HEAD} wide; got {q.shape[3]}"
        if q.shape[2] // k.shape[2] > MOST_HEADS:
            return f"at most {MOST_HEADS} query heads share a key head; got {q.shape[2] // k.shape[2]}"
    if queries is not None and queries.shape[2] > WIDEST_VECTOR:
        return f"chunk vectors are at most {WIDEST_VECTOR} wide; got {queries.shape[2]}"
    if chosen is not None and chosen.shape[-1] > MOST_CHUNKS:
        return f"a query chooses at most {MOST_CHUNKS} chunks; got {chosen.shape[-1]}"
    if queries is not None and queries.shape[0] > MOST_ROWS:
        return f"a batch has at most {MOST_ROWS} rows; got {queries.shape[0]}"
    return None


def best_chunks(queries: Tensor, vectors: Tensor, finished: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The contract of `ops.retrieval.op.best_chunks` for bfloat16, float16 and float32; products are float32."""
    chunks, scores = _BestChunks.apply(queries, vectors, finished, count)
    return chunks, scores


def choose_chunks(
    queries: Tensor,
    vectors: Tensor,
    temperature: Tensor,
    chunk: int,
    candidates: int,
    count: int,
    begun: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The choice for a text that is read without gradients: token t of it has t // chunk chunks before it.

    `queries` ``[B, T, E]`` of any norm, `vectors` ``[B, N, E]`` of norm 1, `temperature` ``[1]`` (its logarithm).
    `begun` int64 ``[1]``: tokens of the text before these; None = 0. Vectors of chunks that have not ended do not
    count. Returns the numbers int64 ``[B, T, C]`` of the `count` best chunks, the best first and -1 = none; their
    logits; and their share ``[B, T]`` of the best `candidates` (`Retrieval` has the formula). Logits and share are
    float32.
    """
    queries, vectors = queries.contiguous(), vectors.contiguous()
    (rows, length, width), whole = queries.shape, vectors.shape[1]
    candidates = min(candidates, whole)
    count = min(count, candidates)
    chosen = torch.empty((rows, length, count), device=queries.device, dtype=torch.long)
    weights = torch.empty((rows, length, count), device=queries.device, dtype=torch.float32)
    share = torch.empty((rows, length), device=queries.device, dtype=torch.float32)
    BQ, BN, warps = _choice_blocks(length, width, queries.dtype)
    with on_device(queries):
        forward_kernels.choose_chunks_kernel[(triton.cdiv(length, BQ), rows)](
            queries, vectors, temperature, queries if begun is None else begun, chosen, weights, share, length, whole,
            E=width, U=chunk, C=candidates, TOP=count, GIVEN=begun is not None, BQ=BQ, BN=BN,
            BE=product_block(width, WIDEST_VECTOR, queries.dtype), BC=triton.next_power_of_2(candidates),
            num_warps=warps, **_numbers(queries.dtype),
        )  # fmt: skip
    return chosen, weights, share


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int, scale: float
) -> Tensor:
    """The contract of `ops.retrieval.reference.selected_attention`; q, k, v of one dtype, the softmax is float32.

    Products round their operands to that dtype (launch.py says how).
    """
    out: Tensor = _SelectedAttention.apply(q, k, v, chunks, weights, chunk, scale)
    return out


def _numbers(dtype: torch.dtype) -> dict[str, Any]:
    # One stage for float32: loads for several iterations would not fit into shared memory.
    return {"num_stages": 2 if dtype == torch.bfloat16 else 1, **arithmetic(dtype).constants()}


def _by_chunk(chunks: Tensor, whole: int) -> tuple[Tensor, Tensor]:
    """The numbers of the choices ``[B, T, C]`` of each row, sorted by chunk, and where those of each chunk begin.

    They are int64 ``[B, T * C]`` and ``[B, whole + 1]``; choices of no chunk (-1) come first. Sizes do not depend on
    the choice, so nothing waits for the GPU. Short rows are sorted in one launch.
    """
    number, order = chunks.int().flatten(1).sort(dim=1, stable=True)
    first = torch.arange(whole + 1, device=chunks.device, dtype=torch.int32).expand(chunks.shape[0], -1).contiguous()
    return order, torch.searchsorted(number, first)


def _choice_blocks(length: int, width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Queries and chunks of one program, and its warps."""
    wide, narrow = width > 64, dtype == torch.bfloat16
    if length > 16:
        return 32 if wide else 64, 64 if narrow or not wide else 32, 4
    # Few queries, as in a decoding step, have few programs: each reads many chunks at a time.
    if narrow and not wide:
        return 16, 512, 8
    return 16, 32 if wide and not narrow else 64 if wide else 128, 4


class _BestChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, finished: Tensor, count: int) -> tuple[Tensor, Tensor]:
        queries, vectors, finished = queries.contiguous(), vectors.contiguous(), finished.contiguous()
        (rows, length, width), whole = queries.shape, vectors.shape[1]
        chosen = torch.empty((rows, length, count), device=queries.device, dtype=torch.long)
        scores = torch.empty((rows, length, count), device=queries.device, dtype=torch.float32)
        BQ, BN, warps = _choice_blocks(length, width, queries.dtype)
        with on_device(queries):
            forward_kernels.best_chunks_kernel[(triton.cdiv(length, BQ), rows)](
                queries, vectors, finished, chosen, scores, length, whole,
                E=width, C=count, BQ=BQ, BN=BN, BE=product_block(width, WIDEST_VECTOR, queries.dtype),
                BC=triton.next_power_of_2(count),
                num_warps=warps, **_numbers(queries.dtype),
            )  # fmt: skip
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(queries, vectors, chosen)
        return chosen, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, vectors, chosen = ctx.saved_tensors
        d_scores = gradients[1].contiguous()
        (rows, length, width), (whole, count) = queries.shape, (vectors.shape[1], chosen.shape[2])
        order, bounds = _by_chunk(chosen, whole)
        d_queries, d_vectors = torch.empty_like(queries), torch.empty_like(vectors)
        columns = triton.next_power_of_2(width)
        constants = {"E": width, "C": count, "BE": columns, "BR": max(1, min(64, 4096 // columns))}
        with on_device(queries):
            backward_kernels.score_queries_kernel[(triton.cdiv(rows * length, constants["BR"]),)](
                vectors, chosen, d_scores, d_queries, rows * length, length, whole, **constants
            )
            backward_kernels.score_vectors_kernel[(rows * whole,)](
                queries, order, bounds, d_scores, d_vectors, length, whole, **constants
            )
        return d_queries, d_vectors, None, None


@dataclass(frozen=True)
class _Plan:
    """Sizes of one attention and the blocks of its kernels."""

    rows: int
    length: int
    columns: int
    heads: int
    key_heads: int
    width: int
    chosen: int
    chunk: int
    weighted: bool
    dtype: torch.dtype

    @property
    def products(self) -> bool:
        return self.chunk >= SHORTEST_PRODUCT

    @property
    def whole(self) -> int:
        """Whole chunks of a row."""
        return self.columns // self.chunk

    def sizes(self) -> dict[str, Any]:
        return {"H": self.heads, "G": self.key_heads, "D": self.width, "C": self.chosen, "U": self.chunk} | {
            "WEIGHTED": self.weighted
        }

    def by_token(self) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
        """Grid, sizes at run time and constants of the kernels that serve queries."""
        if self.products:
            width = product_block(self.width, WIDEST_HEAD, self.dtype)
            constants = {"BH": block(self.heads // self.key_heads, MOST_HEADS), "BD": width}
            # Wide operands take more registers, so blocks are smaller and warps more.
            narrow = self.dtype == torch.bfloat16
            constants |= {"BU": block(self.chunk, min(64, (8192 if narrow else 4096) // width))}
            constants |= _numbers(self.dtype)
            large = constants["BH"] * width > (2048 if narrow else 512)
            grid: tuple[int, ...] = (self.rows * self.length, self.key_heads)
            return grid, (self.length, self.columns), {**self.sizes(), **constants, "num_warps": 4 if large else 2}
        width = triton.next_power_of_2(self.width)
        tokens = max(16, min(128, 2048 // width))
        grid = (triton.cdiv(self.rows * self.length, tokens), self.heads)
        constants = {"BR": tokens, "BD": width, "num_warps": 4 if tokens * width > 1024 else 2}
        return grid, (self.rows * self.length, self.length, self.columns), {**self.sizes(), **constants}

    def by_chunk(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Grid and constants of the kernel that serves keys and values."""
        width = product_block(self.width, WIDEST_HEAD, self.dtype)
        narrow = self.dtype == torch.bfloat16
        tokens = block(self.chunk, min(64, (4096 if narrow else 2048) // width))
        usual = self.chunk * self.chosen * self.heads // self.key_heads
        lines = block(usual, 64 if narrow and width <= 128 else 32 if width <= 128 else 16)
        grid = (self.rows * self.whole, triton.cdiv(self.chunk, tokens), self.key_heads)
        constants = {**self.sizes(), "BL": lines, "BU": tokens, "BD": width, **_numbers(self.dtype)}
        return grid, {**constants, "num_warps": 1 if lines * tokens <= 256 and width <= 64 else 4}


class _SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int, scale: float
    ) -> Tensor:
        q, k, v, chunks = q.contiguous(), k.contiguous(), v.contiguous(), chunks.contiguous()
        weights = None if weights is None else weights.contiguous()
        (rows, length, heads, width), (_, columns, key_heads, _) = q.shape, k.shape
        sizes = (rows, length, columns, heads, key_heads, width)
        plan = _Plan(*sizes, chosen=chunks.shape[2], chunk=chunk, weighted=weights is not None, dtype=v.dtype)
        out = torch.empty_like(q)
        totals = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
        grid, at_run_time, constants = plan.by_token()
        run = forward_kernels.attend_kernel if plan.products else forward_kernels.attend_rows_kernel
        with on_device(q):
            run[grid](
                q, k, v, chunks, q if weights is None else weights, out, totals, scale, *at_run_time, **constants
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, chunks, weights, out, totals)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, chunks, weights, out, totals = ctx.saved_tensors
        plan, scale, d_out = ctx.plan, ctx.scale, gradients[0].contiguous()
        d_q, deltas = torch.empty_like(q), torch.empty_like(totals)
        parts = plan.key_heads if plan.products else plan.heads
        d_weights = None if weights is None else totals.new_empty((*chunks.shape[:2], parts, plan.chosen))
        d_k, d_v = torch.empty_like(k), torch.empty_like(v)
        for d in (d_k, d_v):
            d[:, plan.whole * plan.chunk :] = 0
        order, bounds = _by_chunk(chunks, plan.whole)
        given = q if weights is None else weights
        grid, at_run_time, constants = plan.by_token()
        kernels = backward_kernels
        run = kernels.query_gradients_kernel if plan.products else kernels.query_gradients_rows_kernel
        with on_device(q):
            run[grid](
                q, k, v, chunks, given, out, totals, d_out, d_q, deltas if d_weights is None else d_weights, deltas,
                scale, *at_run_time, **constants,
            )  # fmt: skip
            grid, constants = plan.by_chunk()
            kernels.key_gradients_kernel[grid](
                q, k, v, given, order, bounds, totals, deltas, d_out, d_k, d_v, scale,
                plan.length, plan.whole, plan.columns, **constants,
            )  # fmt: skip
        to_weights = None if d_weights is None or weights is None else d_weights.sum(2).to(weights.dtype)
        return d_q, d_k, d_v, None, to_weights, None, None
