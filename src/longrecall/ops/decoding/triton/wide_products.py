"""Matrix products of a decoding step for many rows: all projections of a layer in one launch, gate and up in another.

A step of 3 to some hundred rows reads every weight once and computes little with it, so its time is that of its
launches: a library takes one for each weight, of which two may be only a few rows high. Here programs take tiles of
whichever weight is theirs. They are launched while the kernel before is still at work (ops/kernels/dependent_launch.py)
and ask for their part of the weight in the meantime.

A weight of one byte a number becomes an operand in registers, between its load and its product. torchao's own product
first writes all of the weight in the model's dtype and reads that again: five bytes a number, and three launches. Both
int8 and float8_e4m3fn numbers are bfloat16 numbers, so nothing is rounded there, and scales are applied to the finished
sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.decoding.triton.products import MOST_PARTS, Weight, numbers_of, scales_of, weight_of_block, wide
from longrecall.ops.kernels.dependent_launch import wait_if_prefetching, wait_unless_prefetching
from longrecall.ops.kernels.launch import arithmetic, block, interpreting, kernel, processors, product, shared_memory
from longrecall.ops.readable import check_numbers
from longrecall.ops.row_scaled import RowScaled

MOST_ROWS = 256
"""Beyond so many rows a product is bound by arithmetic, and a library's is better at that."""
MOST_ROWS_ALONE = 64
"""The same of a product with one plain weight, which shares its launch with no other."""
_LEAST, _MOST = 16, 64
"""The fewest and the most rows of the weight in a tile of sums."""
_BUSY = 0.3
"""Tiles of the weight for each multiprocessor, below which they are cut smaller."""
_HIGH = 128
"""The most rows of x in a tile of sums."""
_COLUMNS = 128
"""Columns of the weight in a tile; twice as many of a tile of the fewest rows."""
_LEAST_COLUMNS = 64
"""The fewest, where shared memory is short: rows of 128 bytes, see `launch.product_block`."""
_LINE = 128
"""Bytes of a line of memory, which is asked for as a whole."""
_APART = 8
"""Where the products with several weights begin in memory: at multiples of so many numbers, 16 bytes."""


class Tile(NamedTuple):
    """How a launch is cut: rows of x and of the weight in a tile of sums, columns at a time, and Triton's options."""

    high: int
    tall: int
    columns: int
    stages: int
    warps: int


@triton.jit
def _ask_for(w, n, count, size, LINES: tl.constexpr, LINE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Bring rows `n` of w ``[count, size]`` near: into the cache that all multiprocessors share."""
    columns = tl.arange(0, LINES) * LINE
    inside = (n < count)[:, None] & (columns < size)[None, :]
    # What is past the end asks for the first line once more.
    place = w + tl.where(inside, n[:, None].to(tl.int64) * size + columns[None, :], 0)
    if INTERPRETED:
        tl.load(place, mask=inside)  # the interpreter has no instruction for it, and tests look at the addresses
    else:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _more(
    total, w, x, n, m, k, count, size, N, x_row,
    SCALED: tl.constexpr, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total ``[BN, BM]`` + w[n, k] x[m, k]^T. The weight comes first: an operand in registers must be the first."""
    inside = k < size
    place = w + n[:, None].to(tl.int64) * size + k[None, :]
    held = tl.load(place, mask=(n < count)[:, None] & inside[None, :], other=0.0)
    part = tl.load(x + m[:, None] * x_row + k[None, :], mask=(m < N)[:, None] & inside[None, :], other=0.0)
    if SCALED:
        held = wide(held)
    return product(held, tl.trans(part), total, DOT, UPCAST, PRECISION)


@triton.jit
def _scaled(total, scales, n, count, SCALED: tl.constexpr):
    """Finished sums ``[BN, BM]`` of rows `n`, times the scales of these rows where there are any."""
    if SCALED:
        total *= tl.load(scales + n, mask=n < count, other=0.0)[:, None]
    return total


@kernel
def _wide_product_kernel(
    x, w0, w1, w2, w3, w4, w5, w6, w7, w8, s0, s1, s2, s3, s4, s5, s6, s7, s8,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, bias, out, x_row, N, size,
    PARTS: tl.constexpr, APART: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    block = tl.program_id(0)
    w, s, count, begun, place = weight_of_block(
        block, w0, w1, w2, w3, w4, w5, w6, w7, w8, s0, s1, s2, s3, s4, s5, s6, s7, s8,
        n0, n1, n2, n3, n4, n5, n6, n7, n8, PARTS, BN, APART,
    )  # fmt: skip
    n = (block - begun) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    wait_unless_prefetching(EARLY)
    if EARLY == 2:
        _ask_for(w, n, count, size, LINES, LINE, UPCAST)
    wait_if_prefetching(EARLY)
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, size, BK):
        k = first + tl.arange(0, BK)
        total = _more(total, w, x, n, m, k, count, size, N, x_row, SCALED, DOT, UPCAST, PRECISION)
    total = _scaled(total, s, n, count, SCALED)
    inside = n < count
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    found = out + place * N + m[None, :] * count + n[:, None]
    tl.store(found, total.to(out.dtype.element_ty), mask=inside[:, None] & (m < N)[None, :])


@kernel
def _wide_gate_up_kernel(
    x, gate, up, gate_scales, up_scales, out, x_row, N, size, count,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    wait_unless_prefetching(EARLY)
    if EARLY == 2:
        _ask_for(gate, n, count, size, LINES, LINE, UPCAST)
        _ask_for(up, n, count, size, LINES, LINE, UPCAST)
    wait_if_prefetching(EARLY)
    g, u = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    for first in range(0, size, BK):
        k = first + tl.arange(0, BK)
        g = _more(g, gate, x, n, m, k, count, size, N, x_row, SCALED, DOT, UPCAST, PRECISION)
        u = _more(u, up, x, n, m, k, count, size, N, x_row, SCALED, DOT, UPCAST, PRECISION)
    kind: tl.constexpr = out.dtype.element_ty
    # Rounded where the layer rounds.
    g = _scaled(g, gate_scales, n, count, SCALED).to(kind).to(tl.float32)
    u = _scaled(u, up_scales, n, count, SCALED).to(kind).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    found = out + m[None, :] * count + n[:, None]
    tl.store(found, (activated * u).to(kind), mask=(n < count)[:, None] & (m < N)[None, :])


def serves(weight: Tensor, rows: int) -> bool:
    """Whether a plain weight ``[n, d]`` is multiplied here, for so many rows of x."""
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype == torch.bfloat16
    return plain and rows <= MOST_ROWS and weight.stride() == (weight.shape[1], 1)


def tile_of(x: Tensor, weight: Weight, counts: Sequence[int], pairs: int = 1) -> Tile:
    """How a launch for x ``[rows, size]`` and weights like this one, of so many rows each, is cut.

    A tile has sums for `pairs` weights. The fastest of a search on an H200 for 16, 64 and 256 rows of 1,024 channels,
    cut down where the GPU's shared memory cannot hold it.
    """
    rows, size = x.shape
    tall = _MOST
    while tall > _LEAST and sum(triton.cdiv(n, tall) for n in counts) < _BUSY * processors(x):
        tall //= 2
    columns = _COLUMNS
    if tall == _LEAST:
        high, columns = block(rows, 32), 2 * _COLUMNS
    elif rows <= _HIGH:
        high = block(rows, _HIGH // 2)
    else:
        high, columns = _HIGH, _COLUMNS // pairs
    columns = block(size, columns) if interpreting() else columns
    stages = 5 if pairs == 1 and tall == _MOST and high < _HIGH else 4
    return _fitted(Tile(high, tall, columns, stages, warps=8 if high == _HIGH else 4), x, weight, pairs)


def _fitted(tile: Tile, x: Tensor, weight: Weight, pairs: int) -> Tile:
    """The tile, cut down to what a program's shared memory holds: columns first, which cost the least."""
    room, each = shared_memory(x), numbers_of(weight).element_size()
    rounded = arithmetic(weight.dtype)

    def needed(tile: Tile) -> int:
        """At most: a buffer for each stage, and x as an operand in other numbers than it has in memory."""
        operands = 0 if rounded.dtype == x.dtype == torch.bfloat16 else 1 if rounded.precision == "tf32" else 2
        stage = pairs * tile.tall * each + tile.high * x.element_size()
        return tile.columns * (tile.stages * stage + operands * tile.high * rounded.dtype.itemsize)

    while needed(tile) > room and tile.columns > _LEAST_COLUMNS:
        tile = tile._replace(columns=tile.columns // 2)
    while needed(tile) > room and tile.stages > 2:
        tile = tile._replace(stages=tile.stages - 1)
    while needed(tile) > room and tile.high > _LEAST:
        tile = tile._replace(high=tile.high // 2)
    return tile


def _constants(weight: Weight, tile: Tile) -> dict[str, object]:
    """What both kernels take by name."""
    numbers = numbers_of(weight)
    line = _LINE // numbers.element_size()
    return {
        "SCALED": isinstance(weight, RowScaled), "BM": tile.high, "BN": tile.tall, "BK": tile.columns,
        "LINES": triton.next_power_of_2(triton.cdiv(numbers.shape[1], line)), "LINE": line,
        **arithmetic(weight.dtype).constants(), "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def wide_products(
    x: Tensor, weights: Sequence[Weight], bias: Tensor | None = None, tile: Tile | None = None
) -> list[Tensor]:
    """A product for each weight ``[n, d]`` with x ``[B, d]`` -> ``[B, n]`` in the weights' dtype.

    Rows of x may lie apart. Weights of one kind that follow each other share launches. `bias` ``[n]`` is for one weight
    alone.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    outs: list[Tensor] = []
    for _, alike in groupby(weights, lambda weight: numbers_of(weight).dtype):
        group = list(alike)
        for first in range(0, len(group), MOST_PARTS):
            outs += _products(x, group[first : first + MOST_PARTS], bias, tile)
    return outs


def _products(x: Tensor, group: list[Weight], bias: Tensor | None, tile: Tile | None) -> list[Tensor]:
    """`wide_products` in one launch."""
    (rows, size), filler = x.shape, [group[0]] * (MOST_PARTS - len(group))
    numbers = [numbers_of(weight) for weight in (*group, *filler)]
    counts = [len(weight) for weight in numbers[: len(group)]]
    check_numbers(
        "wide_products", *(("weight", w, n * size) for w, n in zip(numbers, counts, strict=False)),
        *([] if bias is None else [("bias", bias, counts[0])]),
    )  # fmt: skip
    places = [0]
    for count in counts:
        places.append(places[-1] + triton.cdiv(count, _APART) * _APART)
    out = torch.empty(places[-1] * rows, device=x.device, dtype=group[0].dtype)
    tile = tile or tile_of(x, group[0], counts)
    _wide_product_kernel[(sum(triton.cdiv(count, tile.tall) for count in counts), triton.cdiv(rows, tile.high))](
        x, *numbers, *(scales_of(weight) for weight in (*group, *filler)), *counts, *[0] * len(filler),
        out if bias is None else bias, out, x.stride(0), rows, size,
        PARTS=len(group), APART=_APART, BIAS=bias is not None, **_constants(group[0], tile),
    )  # fmt: skip
    parts = zip(places, counts, strict=False)
    return [out[place * rows : place * rows + count * rows].view(rows, count) for place, count in parts]


def wide_product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """weight ``[n, d]`` x ``[B, d]`` + bias ``[n]`` -> ``[B, n]`` in the weight's dtype; rows of x may lie apart."""
    return wide_products(x, [weight], bias)[0]


def wide_gate_up(x: Tensor, gate: Weight, up: Weight, tile: Tile | None = None) -> Tensor:
    """silu(gate x) * (up x) of x ``[B, d]`` -> ``[B, n]`` in the weights' dtype; both weights are of one kind."""
    (rows, size), numbers, others = x.shape, numbers_of(gate), numbers_of(up)
    count = len(numbers)
    check_numbers("wide_gate_up", ("gate", numbers, count * size), ("up", others, count * size))
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, count, device=x.device, dtype=gate.dtype)
    tile = tile or tile_of(x, gate, [count], pairs=2)
    _wide_gate_up_kernel[(triton.cdiv(count, tile.tall), triton.cdiv(rows, tile.high))](
        x, numbers, others, scales_of(gate), scales_of(up), out, x.stride(0), rows, size, count,
        **_constants(gate, tile),
    )  # fmt: skip
    return out
