"""Sums of the columns of a tall matrix: what the gradient of a bias is. No atomics: two runs agree to the bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.launch import kernel, on_device, walkers, why_not_tensors

ROWS, COLUMNS = 64, 64
"""The tile that a program adds up at a time."""

PROGRAMS = 4
"""Programs for each multiprocessor."""

FEW = 4
"""Up to this many tiles one program is faster than several programs and a second launch for their sums."""


@kernel
def column_sums_kernel(x, sums, N, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Every `num_programs`-th tile of x ``[N, C]``; `sums` float32 ``[programs, C]``."""
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        total += tl.load(x + rows * C + channel, mask=(rows < N) & (channel < C), other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0) * C + channel, tl.sum(total, 0)[None, :], mask=channel < C)


def why_not(x: Tensor) -> str | None:
    """Why the kernel cannot sum the columns of x ``[N, C]``, in words; None = it can."""
    return why_not_tensors(x)


def column_sums(x: Tensor) -> Tensor:
    """x ``[N, C]`` -> float32 ``[C]``."""
    x = x.contiguous()
    columns = triton.cdiv(x.shape[1], COLUMNS)
    tiles = triton.cdiv(len(x), ROWS)
    count = 1 if tiles <= FEW else walkers(x, tiles, columns, PROGRAMS)
    sums = torch.empty((count, x.shape[1]), device=x.device, dtype=torch.float32)
    with on_device(x):
        column_sums_kernel[(count, columns)](x, sums, len(x), x.shape[1], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return sums[0] if count == 1 else sums.sum(0)
