"""Root-mean-square norms, computed in float32 whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019); with groups, an rms for each of them."""

    def __init__(self, size: int, eps: float = 1e-5, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> ``[..., size]``, same dtype."""
        size = x.shape[-1]
        wide = x if x.dtype == torch.float64 else x.float()
        if self.groups == 1:
            normed = F.rms_norm(wide, (size,), None, self.eps)
        else:
            normed = F.rms_norm(wide.unflatten(-1, (self.groups, -1)), (size // self.groups,), None, self.eps).flatten(
                -2
            )
        return (normed * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, groups={self.groups}"


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension: the key and query norm of the delta-rule family."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
