"""The work between the large products of a layer: norms, gates and the sum of the residual stream.

The definition of each op is written in torch below. Each also has a kernel that makes one pass over memory, and keeps
nothing for the backward pass in a wider dtype than the model's (triton/rms_norm.py, triton/gated.py). The kernels serve
tensors on a GPU from 16 rows on. Under torch.compile they are not used, as it fuses the definitions itself.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, Presumed, declare, kernel

Gate = Literal["silu", "sigmoid", "silu_before"]
"""Name of a gate -> its activation, and whether it multiplies before the norm."""

RMS_NORM = declare(Op("rms_norm", kernels="norms.triton.rms_norm", compiler_fuses=True))
GATED_RMS_NORM = declare(Op("gated_rms_norm", kernels="norms.triton.gated", asks="why_not_norm", compiler_fuses=True))
SILU_PRODUCT = declare(Op("silu_product", kernels="norms.triton.gated", compiler_fuses=True))


def _of_norm(x: Tensor, update: Tensor | None, weight: Tensor, *_: Any) -> Presumed:
    return ("weight", weight, x.shape[-1]), ("update", update, x.numel())


def _of_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, *_: Any) -> Presumed:
    return ("weight", weight, x.shape[-1]), ("gate", gate, x.numel())


def _of_product(gate: Tensor, up: Tensor, *_: Any) -> Presumed:
    return (("up", up, gate.numel()),)


_add_rms_norm = kernel("norms.triton.rms_norm", "add_rms_norm", presumes=_of_norm)
_gated_rms_norm = kernel("norms.triton.gated", "gated_rms_norm", presumes=_of_gated_norm)
_gated_norm_projection = kernel("norms.triton.gated", "gated_norm_projection", presumes=_of_gated_norm)
_silu_product = kernel("norms.triton.gated", "silu_product", presumes=_of_product)
_gated_projection = kernel("norms.triton.gated", "gated_projection", presumes=_of_product)


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
    if RMS_NORM.on_kernels({"x": x, "weight": weight}, backend, groups=groups):
        normed: Tensor = _add_rms_norm(x, None, weight, eps, dtype, groups)[1]
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
    if RMS_NORM.on_kernels(tensors, backend, groups=groups):
        both: tuple[Tensor, Tensor] = _add_rms_norm(x, update, weight, eps, dtype, groups)
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
    if GATED_RMS_NORM.on_kernels({"x": x, "gate": gate, "weight": weight}, backend, groups=groups):
        out: Tensor = _gated_rms_norm(x, gate, weight, eps, kind, dtype, groups)
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
    if GATED_RMS_NORM.on_kernels({"x": x, "gate": gate, "weight": weight}, backend, groups=groups):
        # The normed rows have the dtype of the product already, under autocast too. The matrix is cast to it.
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _gated_norm_projection(x, gate, weight, matrix.to(dtype), eps, kind, dtype, groups)
        return out
    normed = gated_rms_norm(x, gate, weight, eps, kind=kind, groups=groups, dtype=dtype, backend="reference")
    return F.linear(normed.reshape(gate.shape), matrix)


def silu_product(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up, both ``[...]`` and of one dtype (Shazeer 2020, SwiGLU); `backend` as in `rms_norm`."""
    if SILU_PRODUCT.on_kernels({"gate": gate, "up": up}, backend):
        out: Tensor = _silu_product(gate, up)
        return out
    return F.silu(gate) * up


def gated_projection(gate: Tensor, up: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """`silu_product` ``[..., n]`` times a weight ``[d, n]`` -> ``[..., d]``.

    The kernels keep gate and up for the backward pass, and make their product again. `backend` as in `rms_norm`.
    """
    if SILU_PRODUCT.on_kernels({"gate": gate, "up": up}, backend):
        # Under autocast the projections have its dtype already. The weight is cast to it.
        with torch.autocast(gate.device.type, enabled=False):
            out: Tensor = _gated_projection(gate, up, weight.to(gate.dtype))
        return out
    return F.linear(F.silu(gate) * up, weight)


def _normed(x: Tensor, eps: float, groups: int, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    parts = wide if groups == 1 else wide.unflatten(-1, (groups, -1))
    normed = F.rms_norm(parts, parts.shape[-1:], None, eps)
    return (normed if groups == 1 else normed.flatten(-2)) * weight
