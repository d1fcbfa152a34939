"""Decay and write strength of Gated DeltaNet, from two small projections of a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, Presumed, declare, kernel

DELTA_GATES = declare(Op("delta_gates", kernels="delta_rule.triton.gates", compiler_fuses=True))


def _presumed(decay: Tensor, write: Tensor, log_rate: Tensor, bias: Tensor, *_: Any) -> Presumed:
    heads = decay.shape[-1]
    return ("write", write, decay.numel()), ("log_rate", log_rate, heads), ("bias", bias, heads)


_delta_gates_kernel = kernel("delta_rule.triton.gates", "delta_gates", presumes=_presumed)


def delta_gates(
    decay: Tensor, write: Tensor, log_rate: Tensor, bias: Tensor, factor: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    r"""Log decay :math:`-e^{A} \mathrm{softplus}(a + d)` and beta :math:`f \, \sigma(b)` of Gated DeltaNet.

    Source: Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks", section 3.4, with the decay of Mamba-2.

    Args:
        decay: a, ``[..., H]``, any float dtype; float64 is computed in float64.
        write: b, the same shape and dtype.
        log_rate: A, ``[H]``.
        bias: d, ``[H]``.
        factor: f, the largest beta: 1, or 2 where eigenvalues may be negative.
        backend: "triton" or "reference"; None chooses.

    Returns:
        Both ``[..., H]``, in at least float32.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    if DELTA_GATES.on_kernels({"decay": decay, "write": write}, backend):
        both: tuple[Tensor, Tensor] = _delta_gates_kernel(decay, write, log_rate, bias, factor)
        return both
    wide = torch.float64 if decay.dtype == torch.float64 else torch.float32
    step = F.softplus(decay.to(wide) + bias.to(wide))
    return -log_rate.to(wide).exp() * step, write.to(wide).sigmoid() * factor
