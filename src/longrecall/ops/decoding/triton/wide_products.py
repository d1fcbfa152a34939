"""Products of many rows with a weight of one byte a number: the bytes become operands in registers.

torchao's own product first writes all of the weight in the model's dtype and reads that again: five bytes a number, and
three launches. Here a tile of the weight is converted between its load and its product. Both int8 and float8_e4m3fn
numbers are bfloat16 numbers, so nothing is rounded there, and scales are applied to the finished sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.decoding.triton.products import wide
from longrecall.ops.kernels.launch import arithmetic, block, interpreting, kernel, processors, product
from longrecall.ops.readable import check_numbers
from longrecall.ops.row_scaled import RowScaled

MOST_ROWS = 256
"""Beyond so many rows a product is bound by arithmetic, and a library's is better at that."""
_MOST = 64
"""The most rows of the weight, and of x, in a tile of sums."""
_LEAST = 16
"""The fewest rows of the weight in a tile of sums, where programs are few."""
_COLUMNS = 128
"""Columns of the weight in a tile: a line of memory."""


@kernel
def _wide_product_kernel(
    x, x_row, w, scales, bias, out, N, size, count,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    # The weight's rows are those of the tile: an operand in registers must be the first.
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, size, BK):
        k = first + tl.arange(0, BK)
        held = tl.load(
            w + n[:, None].to(tl.int64) * size + k[None, :],
            mask=(n < count)[:, None] & (k < size)[None, :],
            other=0.0,
        )
        part = tl.load(x + m[:, None] * x_row + k[None, :], mask=(m < N)[:, None] & (k < size)[None, :], other=0.0)
        total = product(wide(held), tl.trans(part), total, DOT, UPCAST, PRECISION)
    inside = n < count
    total *= tl.load(scales + n, mask=inside, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = out + m[None, :] * count + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & (m < N)[None, :])


def wide_product(x: Tensor, weight: RowScaled, bias: Tensor | None = None) -> Tensor:
    """weight ``[n, d]`` x ``[B, d]`` + bias ``[n]`` -> ``[B, n]`` in the weight's dtype; rows of x may lie apart."""
    (rows, size), count = x.shape, len(weight.numbers)
    check_numbers("wide_product", ("weight", weight.numbers, count * size), ("bias", bias, count))
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, count, device=x.device, dtype=weight.dtype)
    high, tall = block(rows, _MOST), _MOST
    columns = block(size, _COLUMNS) if interpreting() else _COLUMNS
    while tall > _LEAST and triton.cdiv(count, tall) * triton.cdiv(rows, high) < processors(x):
        tall //= 2
    _wide_product_kernel[(triton.cdiv(count, tall), triton.cdiv(rows, high))](
        x, x.stride(0), weight.numbers, weight.scales, out if bias is None else bias, out, rows, size, count,
        BIAS=bias is not None, BM=high, BN=tall, BK=columns, **arithmetic(weight.dtype).constants(),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
