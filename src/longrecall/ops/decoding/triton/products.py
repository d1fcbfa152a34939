"""Matrix products for a handful of rows: norm, several weights and the residual addition in one launch each.

At batch 1 the time of a decoding step goes into launches and into reading every weight once. A library takes one launch
per weight. Here one launch computes all input projections of a layer, and every program computes the norm before them
itself. A program begins to load its weight while the kernel before is still running (ops/kernels/dependent_launch.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.dependent_launch import wait_if_prefetching, wait_unless_prefetching
from longrecall.ops.kernels.launch import kernel
from longrecall.ops.readable import check_numbers

MOST_PARTS = 9
"""The most weights of a launch: six of a gated delta layer and three of retrieval around it."""
_ROWS = 8
"""The most weight rows of a program."""
_COLUMNS = 4096
"""The most columns of a weight that a program loads at a time."""
_TILE = 16384
"""Bytes of a weight that a program loads at a time: an eighth of the registers of its threads."""


def _tile(weight: Tensor, most: int = _ROWS) -> tuple[int, int]:
    """Rows of a program, and columns at once, of a weight ``[n, size]``."""
    columns = min(triton.next_power_of_2(weight.shape[1]), _COLUMNS)
    return max(1, min(most, _TILE // (columns * weight.element_size()))), columns


@triton.jit
def vector_part(x, first, size, BD: tl.constexpr):
    """x ``[size]`` from `first` on ``[BD]``, in float32."""
    columns = first + tl.arange(0, BD)
    return tl.load(x + columns, mask=columns < size, other=0.0).to(tl.float32)


@triton.jit
def weight_part(w, n, count, first, size, BD: tl.constexpr):
    """Rows `n` of w ``[count, size]`` from column `first` on ``[BN, BD]``."""
    columns = first + tl.arange(0, BD)
    inside = (n < count)[:, None] & (columns < size)[None, :]
    return tl.load(w + n[:, None] * size + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _normed_scale(part, x, size, eps, BD: tl.constexpr):
    """1 / rms of x ``[size]``; `part` is the first block of x."""
    squares = part * part
    for first in range(BD, size, BD):
        more = vector_part(x, first, size, BD)
        squares += more * more
    return tl.rsqrt(tl.sum(squares, 0) / size + eps)


@triton.jit
def product_of(
    held, part, x, norm, norm_part, offset, scale, w, n, count, size, NORM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Rows `n` of w ``[count, size]`` times x ``[size]``, normed or not; `held` and `part` are their first columns.

    `norm_part`: the first columns of `norm`, with the offset added.
    """
    kind = held.dtype
    if NORM:
        part = (part * scale * norm_part).to(kind).to(tl.float32)
    total = held.to(tl.float32) * part[None, :]
    for first in range(BD, size, BD):
        part = vector_part(x, first, size, BD)
        if NORM:
            part = (part * scale * (vector_part(norm, first, size, BD) + offset)).to(kind).to(tl.float32)
        total += weight_part(w, n, count, first, size, BD).to(tl.float32) * part[None, :]
    return tl.sum(total, 1)


@triton.jit
def small_product(x, w, n, count, size, BD: tl.constexpr):
    """Rows `n` of w ``[count, size]`` times x ``[size]``."""
    held = weight_part(w, n, count, 0, size, BD)
    return product_of(held, vector_part(x, 0, size, BD), x, x, 0.0, 0.0, 1.0, w, n, count, size, False, BD)


@triton.jit
def _or_next(w, count, begun, place, next_w, next_count, block, BN: tl.constexpr):
    """A weight, its rows, and the first block and column of its output; those of the next weight past its blocks."""
    later = begun + tl.cdiv(count, BN)
    there = block >= later
    return (
        tl.where(there, next_w, w), tl.where(there, next_count, count),
        tl.where(there, later, begun), tl.where(there, place + count, place),
    )  # fmt: skip


@kernel
def _project_kernel(
    x, norm, w0, w1, w2, w3, w4, w5, w6, w7, w8, n0, n1, n2, n3, n4, n5, n6, n7, n8, out, size, total, eps, offset,
    PARTS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    x += row * size
    # The weight is chosen here, so that one product is compiled and not one per weight.
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
    wait_unless_prefetching(EARLY)
    held, norm_part = weight_part(w, n, count, 0, size, BD), vector_part(norm, 0, size, BD) + offset
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    scale = _normed_scale(part, x, size, eps, BD)
    y = product_of(held, part, x, norm, norm_part, offset, scale, w, n, count, size, True, BD)
    tl.store(out + row * total + place + n, y.to(out.dtype.element_ty), mask=n < count)


def norm_and_project(
    stream: Tensor, norm: Tensor, eps: float, weights: list[Tensor], offset: float = 0.0
) -> list[Tensor]:
    """RMS norm of stream ``[B, d]``, then a product for each weight ``[n, d]`` -> ``[B, n]`` in the weights' dtype.

    The normed channels are multiplied by `norm` ``[d]`` + `offset`.
    """
    batch, size = stream.shape
    check_numbers("norm_and_project", ("norm", norm, size), *(("weight", x, len(x) * size) for x in weights))
    outs: list[Tensor] = []
    for first in range(0, len(weights), MOST_PARTS):
        group = weights[first : first + MOST_PARTS]
        counts = [weight.shape[0] for weight in group]
        out = torch.empty(batch, sum(counts), device=stream.device, dtype=group[0].dtype)
        filler = MOST_PARTS - len(group)
        rows, columns = _tile(group[0])
        _project_kernel[(sum(triton.cdiv(count, rows) for count in counts), batch)](
            stream, norm, *group, *[group[0]] * filler, *counts, *[0] * filler, out, size, sum(counts), eps, offset,
            PARTS=len(group), BN=rows, BD=columns, num_warps=4,
        )  # fmt: skip
        outs += out.split(counts, dim=1)
    return outs


@kernel
def _gate_up_kernel(
    x, norm, gate, up, out, size, count, eps, offset, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += row * size
    kind = out.dtype.element_ty
    wait_unless_prefetching(EARLY)
    gate_held, up_held = weight_part(gate, n, count, 0, size, BD), weight_part(up, n, count, 0, size, BD)
    norm_part = vector_part(norm, 0, size, BD) + offset
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    scale = _normed_scale(part, x, size, eps, BD)
    g = product_of(gate_held, part, x, norm, norm_part, offset, scale, gate, n, count, size, True, BD)
    u = product_of(up_held, part, x, norm, norm_part, offset, scale, up, n, count, size, True, BD)
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + row * count + n, (activated * u).to(kind), mask=n < count)


def norm_and_gate_up(stream: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, offset: float = 0.0) -> Tensor:
    """silu(gate x) * (up x) of the normed stream x: ``[B, d]`` -> ``[B, n]``; the norm as in `norm_and_project`."""
    batch, size = stream.shape
    count = gate.shape[0]
    check_numbers("norm_and_gate_up", ("norm", norm, size), ("gate", gate, count * size), ("up", up, count * size))
    out = torch.empty(batch, count, device=stream.device, dtype=gate.dtype)
    rows, columns = _tile(gate)
    grid = (triton.cdiv(count, rows), batch)
    _gate_up_kernel[grid](stream, norm, gate, up, out, size, count, eps, offset, BN=rows, BD=columns, num_warps=4)
    return out


@kernel
def _add_product_kernel(
    x, x_row, w, stream, size, count, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += row * x_row
    wait_unless_prefetching(EARLY)
    held = weight_part(w, n, count, 0, size, BD)
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    y = product_of(held, part, x, x, part, 0.0, 1.0, w, n, count, size, False, BD).to(w.dtype.element_ty).to(tl.float32)
    place = stream + row * count + n
    before = tl.load(place, mask=n < count, other=0.0)
    tl.store(place, (before.to(tl.float32) + y).to(before.dtype), mask=n < count)


def add_product(x: Tensor, weight: Tensor, stream: Tensor) -> None:
    """stream ``[B, d]`` += weight ``[d, n]`` x ``[B, n]``, in place."""
    count, size = weight.shape
    check_numbers("add_product", ("x", x, x.shape[0] * size), ("stream", stream, x.shape[0] * count))
    # Fewer rows per program than above: this product has only d rows, and every multiprocessor should have some.
    rows, columns = _tile(weight, _ROWS // 2)
    grid = (triton.cdiv(count, rows), x.shape[0])
    _add_product_kernel[grid](x, x.stride(0), weight, stream, size, count, BN=rows, BD=columns, num_warps=4)
