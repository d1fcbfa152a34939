"""Long filters that are a function of the lag: a sine network under an exponential window (Poli et al. 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLOWEST, FASTEST = 1.5, 0.3
"""The window falls to `TARGET` after this many `max_length`, in the first and in the last channel."""

TARGET = 0.01
LOWEST_BAND = 1e-4


class ImplicitFilter(nn.Module):
    r"""Taps of every channel by lag: :math:`h_l = e^{-|\delta| t} \, W_n \sin(\omega (... W_0 z_l + b_0 ...))`.

    t = l / (max_length - 1). The features z are t and, for every band f from about 0 to bands - 1, the cosine and sine
    of 2 pi f l / max_length. The decays delta spread evenly over the channels and are not trained; omega is, one number
    for each hidden unit, shared by the layers. Source: "Hyena Hierarchy", section 3.3; features and window are those of
    its published code.

    Lags past `max_length` are the same formula further on: finite, faded by the window, and never seen in training.
    """

    def __init__(self, channels: int, *, max_length: int, width: int, depth: int, bands: int, frequency: float) -> None:
        super().__init__()
        self.channels, self.max_length, self.bands, self.start_frequency = channels, max_length, bands, frequency
        features = 2 * bands + 1
        # Plain parameters: a model initialises every nn.Linear as a projection, which would flatten the filter.
        self.in_weight = nn.Parameter(torch.empty(width, features))
        self.in_bias = nn.Parameter(torch.empty(width))
        self.inner_weight = nn.Parameter(torch.empty(depth, width, width))
        self.inner_bias = nn.Parameter(torch.empty(depth, width))
        self.out_weight = nn.Parameter(torch.empty(channels, width))
        self.frequency = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights and biases uniform within 1 / sqrt(fan in), sines of the configured frequency."""
        for weight in (self.in_weight, self.in_bias):
            nn.init.uniform_(weight, -(self.in_weight.shape[1] ** -0.5), self.in_weight.shape[1] ** -0.5)
        for weight in (self.inner_weight, self.inner_bias, self.out_weight):
            nn.init.uniform_(weight, -(self.out_weight.shape[1] ** -0.5), self.out_weight.shape[1] ** -0.5)
        nn.init.constant_(self.frequency, self.start_frequency)

    def forward(self, lags: int) -> Tensor:
        """Taps ``[C, lags]`` of the lags 0..lags-1, in float32 (float64 for float64 weights), under autocast too."""
        weight = self.out_weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        lag = torch.arange(lags, device=weight.device, dtype=wide)
        time = lag / max(1, self.max_length - 1)
        slow, fast = (math.log(TARGET) / share for share in (SLOWEST, FASTEST))
        decay = torch.linspace(slow, fast, self.channels, device=weight.device, dtype=wide)
        with torch.autocast(weight.device.type, enabled=False):
            h = F.linear(self._features(lag, time), self.in_weight.to(wide), self.in_bias.to(wide))
            h = torch.sin(self.frequency.to(wide) * h)
            for inner, bias in zip(self.inner_weight, self.inner_bias, strict=True):
                h = torch.sin(self.frequency.to(wide) * F.linear(h, inner.to(wide), bias.to(wide)))
            taps = F.linear(h, weight.to(wide))
        return (taps * torch.exp(time[:, None] * decay)).t()

    def _features(self, lag: Tensor, time: Tensor) -> Tensor:
        bands = torch.linspace(LOWEST_BAND, self.bands - 1, self.bands, device=lag.device, dtype=lag.dtype)
        angle = (2 * math.pi / self.max_length) * lag[:, None] * bands
        return torch.cat([time[:, None], angle.cos(), -angle.sin()], dim=1)
