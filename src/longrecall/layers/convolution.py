"""The short convolution as a module; the arithmetic is `ops.short_convolution`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.ops import short_convolution


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of width W followed by SiLU, with the last W - 1 inputs as its state."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(W), the default of a depthwise Conv1d."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, state: Tensor | None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x ``[B, T, C]``, state ``[B, C, W - 1]`` or None -> ``[B, T, C]`` and the new state."""
        return short_convolution(x, self.weight, self.bias, state=state, mask=mask)
