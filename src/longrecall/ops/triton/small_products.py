"""Matrix products for a handful of rows: norm, several weights and the residual addition in one launch each.

At batch 1 a decoding step is bound by the number of launches and by reading every weight once. A library product is one
launch per weight; here a layer's input projections are one, and the norm before them is formed where it is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.triton.launch import kernel

MOST_PARTS = 9
"""The six of a gated delta layer and the three of retrieval around it."""
_ROWS, _COLUMNS = 8, 512
"""Weight rows of one program, and how much of them it reads at once."""


@triton.jit
def _normed_scale(x, size, eps, BD: tl.constexpr):
    columns = tl.arange(0, BD)
    squares = tl.zeros([BD], tl.float32)
    for first in range(0, size, BD):
        part = tl.load(x + first + columns, mask=first + columns < size, other=0.0).to(tl.float32)
        squares += part * part
    return tl.rsqrt(tl.sum(squares, 0) / size + eps)


@triton.jit
def small_product(x, norm, scale, w, n, count, size, NORM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Rows `n` of w ``[count, size]`` times x ``[size]``, which is normed first if asked for."""
    columns = tl.arange(0, BD)
    total = tl.zeros([BN, BD], tl.float32)
    for first in range(0, size, BD):
        inside = first + columns < size
        part = tl.load(x + first + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            part *= scale * tl.load(norm + first + columns, mask=inside, other=0.0).to(tl.float32)
            part = part.to(w.dtype.element_ty).to(tl.float32)
        place = w + n[:, None] * size + first + columns[None, :]
        total += tl.load(place, mask=(n < count)[:, None] & inside[None, :], other=0.0).to(tl.float32) * part[None, :]
    return tl.sum(total, 1)


@triton.jit
def _or_next(w, count, begun, place, next_w, next_count, block, BN: tl.constexpr):
    """The weight, its rows, and the first block and column of its output; those of the next one past its blocks."""
    later = begun + tl.cdiv(count, BN)
    there = block >= later
    return (
        tl.where(there, next_w, w), tl.where(there, next_count, count),
        tl.where(there, later, begun), tl.where(there, place + count, place),
    )  # fmt: skip


@kernel
def _project_kernel(
    x, norm, w0, w1, w2, w3, w4, w5, w6, w7, w8, n0, n1, n2, n3, n4, n5, n6, n7, n8, out, size, total, eps,
    PARTS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    x += row * size
    scale = _normed_scale(x, size, eps, BD)
    # Chosen here, so that one product is compiled and not one for every weight.
    w, count, begun, place = w0, n0, 0, 0
    if PARTS > 1:
        w, count, begun, place = _or_next(w, count, begun, place, w1, n1, block, BN)
    if PARTS > 2:
        w, count, begun, place = _or_next(w, count, begun, place, w2, n2, block, BN)
    if PARTS > 3:
        w, count, begun, place = _or_next(w, count, begun, place, w3, n3, block, BN)
    if PARTS > 4:
        w, count, begun, place = _or_next(w, count, begun, place, w4, n4, block, BN)
    if PARTS > 5:
        w, count, begun, place = _or_next(w, count, begun, place, w5, n5, block, BN)
    if PARTS > 6:
        w, count, begun, place = _or_next(w, count, begun, place, w6, n6, block, BN)
    if PARTS > 7:
        w, count, begun, place = _or_next(w, count, begun, place, w7, n7, block, BN)
    if PARTS > 8:
        w, count, begun, place = _or_next(w, count, begun, place, w8, n8, block, BN)
    n = (block - begun) * BN + tl.arange(0, BN)
    y = small_product(x, norm, scale, w, n, count, size, True, BN, BD)
    tl.store(out + row * total + place + n, y.to(out.dtype.element_ty), mask=n < count)


def norm_and_project(stream: Tensor, norm: Tensor, eps: float, weights: list[Tensor]) -> list[Tensor]:
    """RMS norm of stream ``[B, d]``, then a product for each weight ``[n, d]`` -> ``[B, n]`` in the weights' dtype."""
    batch, size = stream.shape
    outs: list[Tensor] = []
    for first in range(0, len(weights), MOST_PARTS):
        group = weights[first : first + MOST_PARTS]
        counts = [weight.shape[0] for weight in group]
        out = torch.empty(batch, sum(counts), device=stream.device, dtype=group[0].dtype)
        filler = MOST_PARTS - len(group)
        _project_kernel[(sum(triton.cdiv(count, _ROWS) for count in counts), batch)](
            stream, norm, *group, *[group[0]] * filler, *counts, *[0] * filler, out, size, sum(counts), eps,
            PARTS=len(group), BN=_ROWS, BD=_COLUMNS, num_warps=4,
        )  # fmt: skip
        outs += out.split(counts, dim=1)
    return outs


@kernel
def _gate_up_kernel(x, norm, gate, up, out, size, count, eps, BN: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += row * size
    scale = _normed_scale(x, size, eps, BD)
    kind = out.dtype.element_ty
    g = small_product(x, norm, scale, gate, n, count, size, True, BN, BD).to(kind).to(tl.float32)
    u = small_product(x, norm, scale, up, n, count, size, True, BN, BD).to(kind).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + row * count + n, (activated * u).to(kind), mask=n < count)


def norm_and_gate_up(stream: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate x) * (up x) of the normed stream x: ``[B, d]`` -> ``[B, n]``."""
    batch, size = stream.shape
    count = gate.shape[0]
    out = torch.empty(batch, count, device=stream.device, dtype=gate.dtype)
    grid = (triton.cdiv(count, _ROWS), batch)
    _gate_up_kernel[grid](stream, norm, gate, up, out, size, count, eps, BN=_ROWS, BD=_COLUMNS, num_warps=4)
    return out


@kernel
def _add_product_kernel(x, x_row, w, stream, size, count, BN: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    y = small_product(x + row * x_row, x, 1.0, w, n, count, size, False, BN, BD).to(w.dtype.element_ty).to(tl.float32)
    place = stream + row * count + n
    before = tl.load(place, mask=n < count, other=0.0)
    tl.store(place, (before.to(tl.float32) + y).to(before.dtype), mask=n < count)


def add_product(x: Tensor, weight: Tensor, stream: Tensor) -> None:
    """stream ``[B, d]`` += weight ``[d, n]`` x ``[B, n]``, in place."""
    count, size = weight.shape
    # Fewer rows a program than above: this product has d rows only, and every multiprocessor should have some.
    rows = _ROWS // 2
    grid = (triton.cdiv(count, rows), x.shape[0])
    _add_product_kernel[grid](x, x.stride(0), weight, stream, size, count, BN=rows, BD=_COLUMNS, num_warps=4)
