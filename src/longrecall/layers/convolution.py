"""The explicit convolution as a module; the arithmetic is that of `ops`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.ops import long_convolution, short_convolution

MOST_SHIFTED_TAPS = 16
"""Wider filters without SiLU are convolved by Fourier transforms."""


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of width W, then SiLU (or nothing); the last W - 1 inputs are its state."""

    def __init__(self, channels: int, width: int, bias: bool = False, activation: str | None = "silu") -> None:
        super().__init__()
        self.activation = activation
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
        if self.activation is None and self.weight.shape[1] > MOST_SHIFTED_TAPS:
            return self._transformed(x, state, mask)
        return short_convolution(x, self.weight, self.bias, state=state, mask=mask, activation=self.activation)

    def _transformed(self, x: Tensor, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = x.new_zeros(x.shape[0], x.shape[2], self.weight.shape[1] - 1)
        y, inputs = long_convolution(x, self.weight.flip(1), history=state.transpose(1, 2), mask=mask, grow=False)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y, inputs.transpose(1, 2)
