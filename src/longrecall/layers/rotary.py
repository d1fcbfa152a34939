"""Rotary position embeddings (Su et al. 2021), half-rotation layout."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate pairs (i, i + P/2) of x ``[B, T, H, P]`` by ``position [B, T] * theta ** (-2 i / P)``.

    Angles are formed in float64: at position 10^6 float32 would already be wrong in the second digit.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = position[..., None].to(torch.float64) * frequency
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(wide)[:, :, None], angle.sin().to(wide)[:, :, None]
    first, second = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def token_positions(start: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """Position of every token ``[B, T]``: `start` ``[B]`` real tokens came before, padding does not count."""
    if mask is None:
        return start[:, None] + torch.arange(length, device=start.device)
    return start[:, None] + (mask.long().cumsum(1) - 1).clamp(min=0)
