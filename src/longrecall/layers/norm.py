"""Norms, computed in float32 whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.block import RMS, NormConfig
from longrecall.ops.norms.op import Gate, add_rms_norm, gated_rms_norm, rms_norm
from longrecall.ops.time_mixing.op import gated_group_norm


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last dimension (Zhang and Sennrich 2019); with groups, an rms for each of them.

    The scale is the weight plus `offset`: checkpoints of some families hold w for a scale of 1 + w.
    """

    def __init__(self, size: int, eps: float = 1e-5, groups: int = 1, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.groups, self.offset = eps, groups, offset
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A scale of one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    @property
    def scale(self) -> Tensor:
        """What the normed channels are multiplied by ``[size]``: in float32 where it is not the weight itself."""
        if not self.offset:
            return self.weight
        return self.offset + (self.weight if self.weight.dtype == torch.float64 else self.weight.float())

    def forward(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        *,
        update: Tensor | None = None,
        of_stream: bool = False,
        gate: Tensor | None = None,
        kind: Gate = "silu",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[..., size]`` -> ``[..., size]`` in `dtype`; None = that of x.

        Args:
            x: what is normed.
            dtype: of the result.
            update: with `of_stream`, what is yet to be added to x, if anything.
            of_stream: x is the residual stream: the sum of x and `update` is normed, and returned before its norm.
            gate: as many numbers as x; the norm is multiplied by this gate, activated as `kind` says.
            kind: as for `ops.norms.op.gated_rms_norm`.
        """
        if of_stream:
            return add_rms_norm(x, update, self.scale, self.eps, groups=self.groups, dtype=dtype)
        if gate is not None:
            return gated_rms_norm(x, gate, self.scale, self.eps, kind=kind, groups=self.groups, dtype=dtype)
        return rms_norm(x, self.scale, self.eps, groups=self.groups, dtype=dtype)

    def extra_repr(self) -> str:
        more = f", offset={self.offset:g}" if self.offset else ""
        return f"{self.weight.shape[0]}, eps={self.eps}, groups={self.groups}{more}"


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * scale + bias over the last dimension (Ba et al. 2016); the scale as in `RMSNorm`."""

    def __init__(self, size: int, eps: float = 1e-5, offset: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.eps, self.offset = eps, offset
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A scale of one, no bias."""
        nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, dtype: torch.dtype | None = None, *, update: Tensor | None = None, of_stream: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[..., size]`` -> ``[..., size]`` in `dtype`; None = that of x. `update` and `of_stream` as in `RMSNorm`."""
        x = x if update is None else x + update
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(wide)
        scale = self.weight.to(wide) + self.offset if self.offset else self.weight.to(wide)
        normed = F.layer_norm(x.to(wide), self.weight.shape, scale, bias, self.eps).to(dtype or x.dtype)
        return (x, normed) if of_stream else normed

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class GroupNorm(nn.GroupNorm):
    """Each head's mean 0 and variance 1, then scaled and shifted by channel (Wu and He 2018)."""

    def forward(self, x: Tensor, gate: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Heads ``[B, T, H, V]`` -> ``[B, T, H * V]`` in `dtype`; None = that of x, in which it is computed then.

        `gate` ``[B, T, H * V]``: the norm is multiplied by silu of it, as `ops.time_mixing.op.gated_group_norm` says.
        """
        if gate is not None:
            return gated_group_norm(x, gate, self.weight, self.bias, self.eps, dtype or x.dtype)
        rows, weight, bias = x.flatten(0, 1).flatten(1), self.weight.to(x.dtype), self.bias.to(x.dtype)
        normed: Tensor = F.group_norm(rows, self.num_groups, weight, bias, self.eps).unflatten(0, x.shape[:2])
        return normed if dtype is None else normed.to(dtype)


Norm = RMSNorm | LayerNorm
"""A norm over the channels of the residual stream."""


def build_norm(config: NormConfig, size: int, eps: float) -> Norm:
    """The norm that `config` describes, over `size` channels; `eps`: where it has none of its own."""
    eps = eps if config.eps is None else config.eps
    if config.kind == RMS:
        return RMSNorm(size, eps, offset=config.offset)
    return LayerNorm(size, eps, config.offset, config.bias)


def operand_dtype(x: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which a projection multiplies what has `dtype` (None = that of x): autocast's, where that is on.

    A norm whose result goes to projections alone may round to it: it computes the same and keeps half as much.
    """
    dtype, device = dtype or x.dtype, x.device.type
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return dtype
    return torch.get_autocast_dtype(device)


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension without a weight, computed in float32, in the dtype of x."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, x.shape[-1:], None, eps).to(x.dtype)


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension: the key and query norm of the delta-rule family."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
