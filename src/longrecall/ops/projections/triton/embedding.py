"""The gradient of looking up rows of a table: one sum over all tokens of each id.

Tokens are sorted by id, so those of one id form a run; one run may fill most of a batch. A program takes a tile of
tokens and sums each run in it. A run that lies within the tile is a row of the gradient. Of a longer run the program
stores its part, and a second launch adds up the parts, many at a time. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors

ROWS, COLUMNS = 64, 64
"""Tokens and channels of a tile."""

FEWEST = 1024
"""Tokens below which torch is as fast."""


@triton.jit
def _join(left, left_began, right, right_began):
    """Join two neighbouring stretches of tokens: the sum since the last run began, and whether one began at all."""
    return tl.where(right_began > 0, right, left + right), left_began | right_began


@triton.jit
def _id(ids, place, low, N):
    """Sorted ids, -1 outside of `low` .. N - 1."""
    return tl.load(ids + place, mask=(place >= low) & (place < N), other=-1).to(tl.int32)


@kernel
def runs_kernel(
    grads, ids, order, out, heads, tails, N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum the runs of a tile of sorted tokens.

    `heads` takes the part of a run that began in an earlier tile, `tails` that of a run that goes on in the next one.
    """
    tile, channel = tl.program_id(0), (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    place = tile * ROWS + tl.arange(0, ROWS)
    row = tl.load(order + place, mask=place < N, other=0)
    inside = (place < N)[:, None] & (channel < D)
    rows = tl.load(grads + row[:, None] * D + channel, mask=inside, other=0.0).to(tl.float32)
    key = _id(ids, place, 0, N)
    began = (key != _id(ids, place - 1, 0, N)).to(tl.int32)[:, None] + tl.zeros([ROWS, COLUMNS], tl.int32)
    sums, began = tl.associative_scan((rows, began), 0, _join)
    ends, last = (key != _id(ids, place + 1, 0, N))[:, None], (place == tile * ROWS + ROWS - 1)[:, None]
    tl.store(out + key[:, None].to(tl.int64) * D + channel, sums, mask=inside & ends & (began > 0))
    spot = tile * D + channel + tl.zeros([ROWS, COLUMNS], tl.int32)
    tl.store(heads + spot, sums, mask=inside & (ends | last) & (began == 0))
    tl.store(tails + spot, sums, mask=inside & last & (ends == 0))


@kernel
def long_runs_kernel(ids, out, heads, tails, N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the run that begins in a tile and goes on past its end, if there is one."""
    tile, channel = tl.program_id(0), (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    end = (tile + 1) * ROWS
    key = _id(ids, end - 1, 0, N)
    if (key >= 0) & (_id(ids, end, 0, N) == key) & (_id(ids, tile * ROWS - 1, 0, N) != key):
        parts = tl.zeros([PARTS, COLUMNS], tl.float32)
        first, going = tile + 1, 1
        while going > 0:
            tiles = (first + tl.arange(0, PARTS))[:, None]
            of_run = _id(ids, tiles * ROWS, 0, N) == key
            parts += tl.load(heads + tiles * D + channel, mask=of_run & (channel < D), other=0.0)
            going = tl.min(of_run.to(tl.int32))
            first += PARTS
        total = tl.sum(parts, 0)[None, :] + tl.load(tails + tile * D + channel, mask=channel < D, other=0.0)
        tl.store(out + key.to(tl.int64) * D + channel, total, mask=channel < D)


def why_not(table: Tensor, ids: Tensor) -> str | None:
    """Why the kernels cannot serve the gradient of rows `ids` of a table ``[V, d]``, in words; None = they can."""
    if ids.numel() < FEWEST:
        return f"fewer than {FEWEST} tokens are left to plain torch"
    return why_not_tensors(table)


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """`ops.projections.embedding.look_up`."""
    return cast(Tensor, _LookUp.apply(ids, table))


class _LookUp(torch.autograd.Function):
    """Ids int64 ``[...]``, table ``[V, d]`` -> ``[..., d]``."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = (table.shape, table.dtype)
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[None, Tensor]:
        (ids,), (shape, dtype) = ctx.saved_tensors, ctx.table
        count, width = ids.numel(), shape[1]
        # Sorting takes one pass for every byte of a number.
        small = torch.int16 if shape[0] <= 2**15 else torch.int32
        keys, order = torch.sort(ids.flatten().to(small), stable=True)
        grads, tiles = d_out.reshape(count, width).contiguous(), triton.cdiv(count, ROWS)
        out = torch.zeros(shape, device=ids.device, dtype=torch.float32)
        heads, tails = (torch.empty((tiles, width), device=ids.device, dtype=torch.float32) for _ in range(2))
        grid, size = (tiles, triton.cdiv(width, COLUMNS)), {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
        with on_device(grads):
            runs_kernel[grid](grads, keys, order, out, heads, tails, count, width, **size)
            long_runs_kernel[grid](keys, out, heads, tails, count, width, PARTS=64, **size)
        return None, out.to(dtype)
