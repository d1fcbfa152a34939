"""What stands between a layer's large products: norms, gates and the sum of the residual stream.

Each op is written out in torch below (its definition), and has a kernel that makes one pass over memory and keeps
nothing wider than the model for the backward pass (triton/normalisation.py, triton/gating.py). The kernels take tensors
on a GPU from 16 rows on; under torch.compile they stand back, as it fuses the definitions itself.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.kernels import backend as triton

Gate = Literal["silu", "sigmoid", "silu_before"]
"""The activation of a gate, and whether it is multiplied before the norm."""

FEWEST_ROWS = 16
"""Fewer rows are bound by launches from Python, which plain torch makes faster."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    groups: int = 1,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich 2019).

    Args:
        x: ``[..., groups * width]``, any float dtype; float64 is computed in float64.
        weight: ``[groups * width]``.
        eps: added to the mean of the squares.
        groups: parts of a row that have an rms each.
        dtype: of the result; None = that of x.
        backend: "triton" or "reference"; None chooses.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    dtype = dtype or x.dtype
    if _kernel("rms_norm", backend, {"x": x, "weight": weight}, groups=groups):
        normed: Tensor = triton.add_rms_norm(x, None, weight, eps, dtype, groups)[1]
        return normed
    return _normed(x, eps, groups, weight).to(dtype)


def add_rms_norm(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    groups: int = 1,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x + update in the dtype of x (x itself without an update), and the `rms_norm` of that; all else as there."""
    dtype = dtype or x.dtype
    tensors = {"x": x, "weight": weight, "update": update}
    if _kernel("rms_norm", backend, tensors, groups=groups):
        both: tuple[Tensor, Tensor] = triton.add_rms_norm(x, update, weight, eps, dtype, groups)
        return both
    stream = x if update is None else x + update
    return stream, rms_norm(stream, weight, eps, groups=groups, dtype=dtype, backend="reference")


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    kind: Gate = "silu",
    groups: int = 1,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The `rms_norm` of x times an activated gate, in float32, rounded once.

    Args:
        x: ``[..., groups * width]``.
        gate: as many numbers in the same order; the shape may differ (heads side by side).
        weight: ``[groups * width]``.
        eps: added to the mean of the squares.
        kind: "silu" (GLA, DeltaNet) or "sigmoid" (Kimi Delta Attention) of the gate times the norm; "silu_before": the
            norm of x * silu(gate) (Mamba-2).
        groups: parts of a row that have an rms each.
        dtype: of the result; None = that of x.
        backend: "triton" or "reference"; None chooses.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    dtype = dtype or x.dtype
    if _kernel("gated_rms_norm", backend, {"x": x, "gate": gate, "weight": weight}, groups=groups):
        out: Tensor = triton.gated_rms_norm(x, gate, weight, eps, kind, dtype, groups)
        return out
    wide = x if x.dtype == torch.float64 else x.float()
    factor = gate.to(wide.dtype).reshape(x.shape)
    factor = factor.sigmoid() if kind == "sigmoid" else F.silu(factor)
    if kind == "silu_before":
        return _normed(wide * factor, eps, groups, weight).to(dtype)
    return (_normed(wide, eps, groups, weight) * factor).to(dtype)


def gated_norm_projection(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    matrix: Tensor,
    eps: float,
    *,
    kind: Gate = "silu",
    groups: int = 1,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The `gated_rms_norm` of x, gate ``[..., n]``, times a matrix ``[d, n]`` -> ``[..., d]``; all else as there.

    The kernels keep x and the gate for the backward pass, and make the normed rows again.
    """
    dtype = dtype or x.dtype
    if _kernel("gated_rms_norm", backend, {"x": x, "gate": gate, "weight": weight}, groups=groups):
        # What is multiplied has its dtype already, that of autocast where it is on; the matrix has to follow it.
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = triton.gated_norm_projection(x, gate, weight, matrix.to(dtype), eps, kind, dtype, groups)
        return out
    normed = gated_rms_norm(x, gate, weight, eps, kind=kind, groups=groups, dtype=dtype, backend="reference")
    return F.linear(normed.reshape(gate.shape), matrix)


def silu_product(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up, both ``[...]`` and of one dtype (Shazeer 2020, SwiGLU); `backend` as in `rms_norm`."""
    if _kernel("silu_product", backend, {"gate": gate, "up": up}):
        out: Tensor = triton.silu_product(gate, up)
        return out
    return F.silu(gate) * up


def gated_projection(gate: Tensor, up: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """`silu_product` ``[..., n]`` times a weight ``[d, n]`` -> ``[..., d]``.

    The kernels keep gate and up for the backward pass, and make their product again. `backend` as in `rms_norm`.
    """
    if _kernel("silu_product", backend, {"gate": gate, "up": up}):
        # Under autocast the projections before are narrow already; the weight has to follow them.
        with torch.autocast(gate.device.type, enabled=False):
            out: Tensor = triton.gated_projection(gate, up, weight.to(gate.dtype))
        return out
    return F.linear(F.silu(gate) * up, weight)


def _normed(x: Tensor, eps: float, groups: int, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    parts = wide if groups == 1 else wide.unflatten(-1, (groups, -1))
    normed = F.rms_norm(parts, parts.shape[-1:], None, eps)
    return (normed if groups == 1 else normed.flatten(-2)) * weight


def _kernel(op: str, backend: str | None, tensors: dict[str, Tensor | None], **options: Any) -> bool:
    """Whether the kernel serves a call; ValueError where it was asked for by name and cannot."""
    if backend == "triton":
        reason = triton.declines(op, tensors, **options)
        if reason is not None:
            raise ValueError(f'backend "triton" cannot serve this call of {op}: {reason}')
        return True
    if backend is not None:
        if backend != "reference":
            raise ValueError(f'unknown backend "{backend}" of {op}; there are reference, triton')
        return False
    return declines(op, tensors, **options) is None


def declines(op: str, tensors: dict[str, Tensor | None], **options: Any) -> str | None:
    """Why a call that may choose is left to plain torch, in words; None = the kernel serves it.

    LONGRECALL_BACKEND in the environment, where it names other backends, holds here too.
    """
    if torch.compiler.is_compiling():
        return "torch.compile fuses it itself"
    x = next(iter(tensors.values()))
    assert x is not None
    wanted = os.environ.get("LONGRECALL_BACKEND") or None
    if wanted not in (None, "triton"):
        return f"LONGRECALL_BACKEND is {wanted}"
    if wanted is None and not x.is_cuda:
        return "the tensors are not on a GPU"
    if x.numel() < FEWEST_ROWS * x.shape[-1] or not x.numel():
        return f"fewer than {FEWEST_ROWS} rows are left to plain torch"
    return triton.declines(op, tensors, **options)
