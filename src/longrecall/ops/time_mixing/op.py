"""What RWKV does before and after its recurrence: mixing a token with the one before, and gated norms of heads.

Each is written out in torch, its definition, and has kernels that make one pass over memory, forward and backward
(triton/token_shift.py, triton/group_norm.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, Presumed, declare, kernel

MIX_WITH_PREVIOUS = declare(Op("mix_with_previous", kernels="time_mixing.triton.token_shift", compiler_fuses=True))
GATED_GROUP_NORM = declare(Op("gated_group_norm", kernels="time_mixing.triton.group_norm", compiler_fuses=True))


def _of_mixtures(x: Tensor, shares: Tensor) -> Presumed:
    return (("shares", shares, len(shares) * x.shape[-1]),)


def _of_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Presumed:
    channels = x.shape[-2] * x.shape[-1]
    return ("gate", gate, x.numel()), ("weight", weight, channels), ("bias", bias, channels)


_mix_with_previous_kernel = kernel("time_mixing.triton.token_shift", "mix_with_previous", presumes=_of_mixtures)
_gated_group_norm_kernel = kernel("time_mixing.triton.group_norm", "gated_group_norm", presumes=_of_norm)


def mix_with_previous(x: Tensor, shares: Tensor, *, backend: str | None = None) -> tuple[Tensor, ...]:
    """Several mixtures of each token and the one before: x + (before - x) * share (Peng et al. 2024, equation 3).

    Args:
        x: ``[B, T, d]``; a zero comes before the first token.
        shares: ``[M, d]``, one row for each mixture.
        backend: "triton" or "reference"; None chooses.

    Returns:
        M mixtures ``[B, T, d]`` in the dtype of x.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    if MIX_WITH_PREVIOUS.on_kernels({"x": x, "shares": shares}, backend):
        mixtures: tuple[Tensor, ...] = _mix_with_previous_kernel(x, shares)
        return mixtures
    change = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
    return tuple((x + change * share).to(x.dtype) for share in shares)


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, *, backend: str | None = None
) -> Tensor:
    """Norm every head of x by its mean and standard deviation; then times weight, plus bias, times silu(gate).

    Args:
        x: ``[B, T, H, V]``, any float dtype; computed in float32 (float64 for float64).
        gate: ``[B, T, H * V]``.
        weight, bias: ``[H * V]``.
        eps: added to the variance.
        dtype: of the result.
        backend: "triton" or "reference"; None chooses.

    Returns:
        ``[B, T, H * V]``.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    if GATED_GROUP_NORM.on_kernels({"x": x, "gate": gate, "weight": weight, "bias": bias}, backend):
        out: Tensor = _gated_group_norm_kernel(x, gate, weight, bias, eps, dtype)
        return out
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    rows = x.to(wide).flatten(0, 1).flatten(1)
    normed = F.group_norm(rows, x.shape[2], weight.to(wide), bias.to(wide), eps)
    return (normed.view(gate.shape) * F.silu(gate.to(wide))).to(dtype)
