"""Matrix products for a handful of rows: norm, several weights and the residual addition in one launch each.

At batch 1 the time of a decoding step goes into launches and into reading every weight once. A library takes one launch
per weight. Here one launch computes all input projections of a layer, and every program computes the norm before them
itself. A program begins to load its weight while the kernel before is still running (ops/kernels/dependent_launch.py).

A weight is a tensor, or the parts of one of 8-bit numbers with a scale for each row (ops/row_scaled.py): then half of
the bytes are read, and a row's sum is multiplied by its scale at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.dependent_launch import wait_if_prefetching, wait_unless_prefetching
from longrecall.ops.kernels.launch import kernel
from longrecall.ops.readable import check_numbers
from longrecall.ops.row_scaled import RowScaled

Weight = Tensor | RowScaled
"""A weight ``[n, d]`` that kernels read."""

MOST_PARTS = 9
"""The most weights of a launch: six of a gated delta layer and three of retrieval around it."""
_ROWS = 8
"""The most weight rows of a program."""
_COLUMNS = 4096
"""The most columns of a weight that a program loads at a time."""
_TILE = 16384
"""Bytes of a weight that a program loads at a time: an eighth of the registers of its threads. Of a weight of one byte
a number it loads half of that: in registers sums are float32, whatever the weight is."""
_LEAST_BYTES = 2


def numbers_of(weight: Weight) -> Tensor:
    """The numbers ``[n, d]`` in memory, not yet scaled."""
    return weight.numbers if isinstance(weight, RowScaled) else weight


def scales_of(weight: Weight) -> Tensor:
    """The scale of each row; of a weight without any, itself: a kernel that reads no scales gets some address."""
    return weight.scales if isinstance(weight, RowScaled) else weight


def _tile(weight: Tensor, most: int = _ROWS) -> tuple[int, int]:
    """Rows of a program, and columns at once, of numbers ``[n, size]``."""
    columns = min(triton.next_power_of_2(weight.shape[1]), _COLUMNS)
    return max(1, min(most, _TILE // (columns * max(weight.element_size(), _LEAST_BYTES)))), columns


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
def wide(held):
    """Numbers of a weight in float32."""
    if held.dtype == tl.int8:
        # A float32 of 2**23 and more counts in ones: the byte b, plus 128, is the last byte of 2**23 + 128 + b. Hopper
        # converts integers at a quarter of the rate at which it does these three operations.
        bits = held.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        return held.to(tl.float32)


@triton.jit
def _scaled(y, scales, n, count, SCALED: tl.constexpr):
    """Sums y of rows `n`, times the scales of these rows where there are any."""
    if SCALED:
        y *= tl.load(scales + n, mask=n < count, other=0.0)
    return y


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
    held, part, x, norm, norm_part, offset, scale, w, n, count, size,
    KIND: tl.constexpr, NORM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Rows `n` of w ``[count, size]`` times x ``[size]``, normed or not; `held` and `part` are their first columns.

    `norm_part`: the first columns of `norm`, with the offset added. KIND: to which a normed x is rounded.
    """
    if NORM:
        part = (part * scale * norm_part).to(KIND).to(tl.float32)
    total = wide(held) * part[None, :]
    for first in range(BD, size, BD):
        part = vector_part(x, first, size, BD)
        if NORM:
            part = (part * scale * (vector_part(norm, first, size, BD) + offset)).to(KIND).to(tl.float32)
        total += wide(weight_part(w, n, count, first, size, BD)) * part[None, :]
    return tl.sum(total, 1)


@triton.jit
def small_product(x, w, n, count, size, BD: tl.constexpr):
    """Rows `n` of w ``[count, size]`` times x ``[size]``."""
    held = weight_part(w, n, count, 0, size, BD)
    part = vector_part(x, 0, size, BD)
    return product_of(held, part, x, x, 0.0, 0.0, 1.0, w, n, count, size, held.dtype, False, BD)


@triton.jit
def _or_next(
    w, scales, count, begun, place, next_w, next_scales, next_count, block, BN: tl.constexpr, APART: tl.constexpr
):  # fmt: skip
    """A weight, its rows, and the first block and column of its output; those of the next weight past its blocks."""
    later = begun + tl.cdiv(count, BN)
    there = block >= later
    return (
        tl.where(there, next_w, w), tl.where(there, next_scales, scales), tl.where(there, next_count, count),
        tl.where(there, later, begun), tl.where(there, place + tl.cdiv(count, APART) * APART, place),
    )  # fmt: skip


@triton.jit
def weight_of_block(
    block, w0, w1, w2, w3, w4, w5, w6, w7, w8, s0, s1, s2, s3, s4, s5, s6, s7, s8,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, PARTS: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The weight of which a block has rows, its scales and rows, and the first block and column of its output.

    It is chosen before the product, so that one product is compiled and not one per weight. Outputs begin at multiples
    of APART columns.
    """
    w, s, count, begun, place = w0, s0, n0, 0, tl.full((), 0, tl.int64)
    if PARTS > 1:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w1, s1, n1, block, BN, APART)
    if PARTS > 2:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w2, s2, n2, block, BN, APART)
    if PARTS > 3:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w3, s3, n3, block, BN, APART)
    if PARTS > 4:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w4, s4, n4, block, BN, APART)
    if PARTS > 5:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w5, s5, n5, block, BN, APART)
    if PARTS > 6:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w6, s6, n6, block, BN, APART)
    if PARTS > 7:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w7, s7, n7, block, BN, APART)
    if PARTS > 8:
        w, s, count, begun, place = _or_next(w, s, count, begun, place, w8, s8, n8, block, BN, APART)
    return w, s, count, begun, place


@kernel
def _project_kernel(
    x, norm, w0, w1, w2, w3, w4, w5, w6, w7, w8, s0, s1, s2, s3, s4, s5, s6, s7, s8,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, out, size, total, eps, offset,
    PARTS: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    x += row * size
    w, s, count, begun, place = weight_of_block(
        block, w0, w1, w2, w3, w4, w5, w6, w7, w8, s0, s1, s2, s3, s4, s5, s6, s7, s8,
        n0, n1, n2, n3, n4, n5, n6, n7, n8, PARTS, BN, 1,
    )  # fmt: skip
    n = (block - begun) * BN + tl.arange(0, BN)
    wait_unless_prefetching(EARLY)
    held, norm_part = weight_part(w, n, count, 0, size, BD), vector_part(norm, 0, size, BD) + offset
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    scale = _normed_scale(part, x, size, eps, BD)
    kind: tl.constexpr = out.dtype.element_ty
    y = product_of(held, part, x, norm, norm_part, offset, scale, w, n, count, size, kind, True, BD)
    y = _scaled(y, s, n, count, SCALED)
    tl.store(out + row * total + place + n, y.to(kind), mask=n < count)


def norm_and_project(
    stream: Tensor, norm: Tensor, eps: float, weights: Sequence[Weight], offset: float = 0.0
) -> list[Tensor]:
    """RMS norm of stream ``[B, d]``, then a product for each weight ``[n, d]`` -> ``[B, n]`` in the weights' dtype.

    The normed channels are multiplied by `norm` ``[d]`` + `offset`. Weights of one kind that follow each other share
    launches.
    """
    size = stream.shape[1]
    numbers = [numbers_of(weight) for weight in weights]
    check_numbers("norm_and_project", ("norm", norm, size), *(("weight", x, len(x) * size) for x in numbers))
    outs: list[Tensor] = []
    for _, alike in groupby(weights, lambda weight: numbers_of(weight).dtype):
        group = list(alike)
        for first in range(0, len(group), MOST_PARTS):
            outs += _project(stream, norm, eps, group[first : first + MOST_PARTS], offset)
    return outs


def _project(stream: Tensor, norm: Tensor, eps: float, group: list[Weight], offset: float) -> list[Tensor]:
    """`norm_and_project` in one launch."""
    (batch, size), filler = stream.shape, [group[0]] * (MOST_PARTS - len(group))
    numbers = [numbers_of(weight) for weight in (*group, *filler)]
    scales = [scales_of(weight) for weight in (*group, *filler)]
    counts = [len(weight) for weight in numbers[: len(group)]]
    out = torch.empty(batch, sum(counts), device=stream.device, dtype=group[0].dtype)
    rows, columns = _tile(numbers[0])
    _project_kernel[(sum(triton.cdiv(count, rows) for count in counts), batch)](
        stream, norm, *numbers, *scales, *counts, *[0] * len(filler), out, size, sum(counts), eps, offset,
        PARTS=len(group), SCALED=isinstance(group[0], RowScaled), BN=rows, BD=columns, num_warps=4,
    )  # fmt: skip
    return list(out.split(counts, dim=1))


@kernel
def _gate_up_kernel(
    x, norm, gate, up, gate_scales, up_scales, out, size, count, eps, offset,
    SCALED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += row * size
    kind: tl.constexpr = out.dtype.element_ty
    wait_unless_prefetching(EARLY)
    gate_held, up_held = weight_part(gate, n, count, 0, size, BD), weight_part(up, n, count, 0, size, BD)
    norm_part = vector_part(norm, 0, size, BD) + offset
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    scale = _normed_scale(part, x, size, eps, BD)
    g = product_of(gate_held, part, x, norm, norm_part, offset, scale, gate, n, count, size, kind, True, BD)
    u = product_of(up_held, part, x, norm, norm_part, offset, scale, up, n, count, size, kind, True, BD)
    g, u = _scaled(g, gate_scales, n, count, SCALED), _scaled(u, up_scales, n, count, SCALED)
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + row * count + n, (activated * u).to(kind), mask=n < count)


def norm_and_gate_up(stream: Tensor, norm: Tensor, eps: float, gate: Weight, up: Weight, offset: float = 0.0) -> Tensor:
    """silu(gate x) * (up x) of the normed stream x: ``[B, d]`` -> ``[B, n]``; the norm as in `norm_and_project`.

    Both weights are of one kind.
    """
    (batch, size), numbers, others = stream.shape, numbers_of(gate), numbers_of(up)
    count = len(numbers)
    check_numbers(
        "norm_and_gate_up", ("norm", norm, size), ("gate", numbers, count * size), ("up", others, count * size)
    )
    out = torch.empty(batch, count, device=stream.device, dtype=gate.dtype)
    rows, columns = _tile(numbers)
    _gate_up_kernel[(triton.cdiv(count, rows), batch)](
        stream, norm, numbers, others, scales_of(gate), scales_of(up), out, size, count, eps, offset,
        SCALED=isinstance(gate, RowScaled), BN=rows, BD=columns, num_warps=4,
    )  # fmt: skip
    return out


@kernel
def _add_product_kernel(
    x, x_row, w, scales, stream, size, count,
    SCALED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += row * x_row
    wait_unless_prefetching(EARLY)
    held = weight_part(w, n, count, 0, size, BD)
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    kind: tl.constexpr = x.dtype.element_ty
    y = product_of(held, part, x, x, part, 0.0, 1.0, w, n, count, size, kind, False, BD)
    y = _scaled(y, scales, n, count, SCALED).to(kind).to(tl.float32)
    place = stream + row * count + n
    before = tl.load(place, mask=n < count, other=0.0)
    tl.store(place, (before.to(tl.float32) + y).to(before.dtype), mask=n < count)


def add_product(x: Tensor, weight: Weight, stream: Tensor) -> None:
    """stream ``[B, d]`` += weight ``[d, n]`` x ``[B, n]``, in place."""
    numbers = numbers_of(weight)
    count, size = numbers.shape
    check_numbers("add_product", ("x", x, x.shape[0] * size), ("stream", stream, x.shape[0] * count))
    # Fewer rows per program than above: this product has only d rows, and every multiprocessor should have some.
    rows, columns = _tile(numbers, _ROWS // 2)
    _add_product_kernel[(triton.cdiv(count, rows), x.shape[0])](
        x, x.stride(0), numbers, scales_of(weight), stream, size, count,
        SCALED=isinstance(weight, RowScaled), BN=rows, BD=columns, num_warps=4,
    )  # fmt: skip


@kernel
def _product_kernel(
    x, x_row, w, scales, bias, out, size, count,
    SCALED: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += row * x_row
    kind: tl.constexpr = out.dtype.element_ty
    wait_unless_prefetching(EARLY)
    held = weight_part(w, n, count, 0, size, BD)
    wait_if_prefetching(EARLY)
    part = vector_part(x, 0, size, BD)
    y = product_of(held, part, x, x, part, 0.0, 1.0, w, n, count, size, kind, False, BD)
    y = _scaled(y, scales, n, count, SCALED)
    if BIAS:
        y += tl.load(bias + n, mask=n < count, other=0.0).to(tl.float32)
    tl.store(out + row * count + n, y.to(kind), mask=n < count)


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """weight ``[n, d]`` x ``[B, d]`` + bias ``[n]`` -> ``[B, n]`` in the weight's dtype; rows of x may lie apart."""
    numbers, rows = numbers_of(weight), x.shape[0]
    count, size = numbers.shape
    check_numbers("product", ("x", x, rows * size), ("bias", bias, count))
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, count, device=x.device, dtype=weight.dtype)
    block, columns = _tile(numbers)
    _product_kernel[(triton.cdiv(count, block), rows)](
        x, x.stride(0), numbers, scales_of(weight), out if bias is None else bias, out, size, count,
        SCALED=isinstance(weight, RowScaled), BIAS=bias is not None, BN=block, BD=columns, num_warps=4,
    )  # fmt: skip
    return out
