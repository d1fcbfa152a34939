"""Root-mean-square norms, computed in float32 whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.ops.norms.op import Gate, add_rms_norm, gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019); with groups, an rms for each of them."""

    def __init__(self, size: int, eps: float = 1e-5, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[..., size]`` -> ``[..., size]`` in `dtype`; None = that of x."""
        return rms_norm(x, self.weight, self.eps, groups=self.groups, dtype=dtype)

    def of_stream(self, x: Tensor, update: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The residual stream x ``[..., size]`` plus an update, if any, and the norm of the sum in `dtype`."""
        return add_rms_norm(x, update, self.weight, self.eps, groups=self.groups, dtype=dtype)

    def gated(self, x: Tensor, gate: Tensor, dtype: torch.dtype, kind: Gate = "silu") -> Tensor:
        """The norm of x ``[..., size]`` times an activated gate, in `dtype`: `ops.normalisation.gated_rms_norm`."""
        return gated_rms_norm(x, gate, self.weight, self.eps, kind=kind, groups=self.groups, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, groups={self.groups}"


def operand_dtype(x: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which a projection multiplies what has `dtype` (None = that of x): autocast's, where that is on.

    A norm whose result goes to projections alone may round to it: it computes the same and keeps half as much.
    """
    dtype, device = dtype or x.dtype, x.device.type
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return dtype
    return torch.get_autocast_dtype(device)


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension: the key and query norm of the delta-rule family."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
