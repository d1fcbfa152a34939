"""Sums over the separate parts that subheads, or groups of rows, have written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.launch import interpreting, kernel

BLOCK = 1024
"""Numbers of the result that a program computes."""


@kernel
def part_sums_kernel(parts, sums, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up `parts` ``[PARTS, size]`` in float32, in their order, and write the result to `sums` ``[size]``."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, PARTS, loop_unroll_factor=8):
        total += tl.load(parts + tl.cast(part, tl.int64) * size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(sums + i, total.to(sums.dtype.element_ty), mask=i < size)


def part_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """parts ``[P, ...]``, contiguous, large -> their sum ``[...]`` in `dtype`, each number rounded once."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    # Triton's interpreter truncates where a GPU rounds float32 to bfloat16. There torch rounds instead.
    sums = torch.empty(parts.shape[1:], dtype=torch.float32 if interpreting() else dtype, device=parts.device)
    part_sums_kernel[(triton.cdiv(sums.numel(), BLOCK),)](
        parts, sums, sums.numel(), PARTS=len(parts), BLOCK=BLOCK, num_warps=4
    )
    return sums.to(dtype)


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the gradients that groups of rows have found for an input they share; None = no gradient is wanted."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], start=found[0]) if found else None
