"""What GLA, RetNet, DeltaNet and Gated DeltaNet share: projections, short convolutions, output norm and gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.mixers.base import LayerState, MixerConfig, StateShapes
from longrecall.layers.norm import RMSNorm


@dataclass(frozen=True)
class LinearAttentionConfig(MixerConfig):
    """Sizes that every linear-attention mixer has."""

    num_heads: int
    """Key heads H."""
    key_dim: int
    """Key width K of one head."""
    value_dim: int
    """Value width V of one head."""

    @property
    def value_head_count(self) -> int:
        """Value heads; equal to `num_heads` unless a family shares keys."""
        return self.num_heads

    @property
    def conv(self) -> int:
        """Width of the short convolutions on q, k and v; 0 = none."""
        return int(getattr(self, "conv_width", 0))

    @property
    def gated(self) -> bool:
        """Whether the output norm is multiplied by silu of a projection of x."""
        return bool(getattr(self, "output_gate", False))

    def state_shapes(self) -> StateShapes:
        heads = self.value_head_count
        merged = bool(getattr(self, "merged", False))
        shapes: StateShapes = {"recurrent": (heads, self.key_dim, self.value_dim * (heads if merged else 1))}
        if self.conv:
            keys, values = self.num_heads * self.key_dim, heads * self.value_dim
            shapes |= {
                f"{name}_conv": (size, self.conv - 1) for name, size in (("q", keys), ("k", keys), ("v", values))
            }
        return shapes


class LinearAttentionMixer(nn.Module):
    """Base of the linear-attention mixers: subclasses add their gates and call one recurrence."""

    def __init__(self, config: LinearAttentionConfig, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        keys = config.num_heads * config.key_dim
        values = config.value_head_count * config.value_dim
        self.head_width, self.value_width = config.key_dim, config.value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if config.gated else None
        self.q_conv = ShortConvolution(keys, config.conv) if config.conv else None
        self.k_conv = ShortConvolution(keys, config.conv) if config.conv else None
        self.v_conv = ShortConvolution(values, config.conv) if config.conv else None
        self.o_norm = RMSNorm(config.value_dim, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def project(
        self, x: Tensor, state: LayerState | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, LayerState]:
        """x ``[B, T, d]`` -> q, k ``[B, T, H, K]``, v ``[B, T, Hv, V]`` and the new convolution states."""
        results, new_state = [], {}
        for name in ("q", "k", "v"):
            y = getattr(self, f"{name}_proj")(x)
            convolution = getattr(self, f"{name}_conv")
            if convolution is not None:
                key = f"{name}_conv"
                y, new_state[key] = convolution(y, None if state is None else state[key], mask)
            results.append(y.unflatten(-1, (-1, self.value_width if name == "v" else self.head_width)))
        return results[0], results[1], results[2], new_state

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """Per-head norm, output gate and projection: o ``[B, T, Hv, V]`` -> ``[B, T, d]``."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        o = self.o_norm(o.to(wide))
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(x).to(wide).unflatten(-1, (-1, self.value_width)))
        projected: Tensor = self.o_proj(o.to(x.dtype).flatten(-2))
        return projected


def mask_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero x ``[B, T, ...]`` at padded positions, which leaves the recurrent state as it was there."""
    return x if mask is None else x * mask.view(*mask.shape, *[1] * (x.dim() - 2)).to(x.dtype)
