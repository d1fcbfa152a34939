"""Sums of the parts that the delta rule's kernels write of the gates' gradients, in one launch instead of six."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.launch import kernel

BLOCK = 1024
"""Numbers of each gradient that a program computes."""


@kernel
def gate_gradients_kernel(
    beta_parts, decay_parts, log_decay, d_beta, d_log_decay, size, strongest, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum parts ``[PARTS, size]``: add beta's to `d_beta`, and write the decay's, 0 where the decay was bounded."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    strength = tl.load(d_beta + i, mask=inside, other=0.0)
    decay = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        strength += tl.load(beta_parts + part * tl.cast(size, tl.int64) + i, mask=inside, other=0.0)
        decay += tl.load(decay_parts + part * tl.cast(size, tl.int64) + i, mask=inside, other=0.0)
    given = tl.load(log_decay + i, mask=inside, other=0.0)
    tl.store(d_beta + i, strength, mask=inside)
    tl.store(d_log_decay + i, tl.where(given < strongest, 0.0, decay), mask=inside)


def finish_gates(
    beta_parts: Tensor, decay_parts: Tensor, log_decay: Tensor, d_beta: Tensor, d_log_decay: Tensor, strongest: float
) -> None:
    """Add the sum of beta's parts ``[P, ...]`` to `d_beta` ``[...]``, and write the decay's sum to `d_log_decay`.

    All tensors are float32 and contiguous. The kernels replace a log decay below `strongest` by it: its gradient is 0.
    """
    size = d_beta.numel()
    gate_gradients_kernel[(triton.cdiv(size, BLOCK),)](
        beta_parts, decay_parts, log_decay, d_beta, d_log_decay, size, strongest,
        PARTS=len(beta_parts), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
