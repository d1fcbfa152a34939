"""Hyena of order 2 (Poli et al. 2023): gate, long implicit convolution, gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.convolution import GatedConvolution
from longrecall.layers.descriptions.hyena import HyenaConfig
from longrecall.layers.implicit_filter import ImplicitFilter
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.projections import project_biased
from longrecall.ops import long_convolution
from longrecall.ops.convolution.long import lags_so_far


class Hyena(nn.Module):
    r"""y = W_o (x_2 * (h conv (x_1 * v) + D * x_1 * v)), x_1, x_2 and v projected and convolved by few taps.

    The recurrence that would make its filter is unknown, so it has no finite state: it keeps x_1 * v of every token, as
    attention keeps keys, and a new token evaluates the filter at every lag and sums over them all. Works at any length;
    past `max_length` the filter goes on as `ImplicitFilter` says.
    """

    def __init__(self, config: HyenaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        inner = config.inner_dim
        self.in_proj = nn.Linear(hidden_size, 3 * inner)
        self.conv = GatedConvolution(inner, config.conv_width)
        self.filter = ImplicitFilter(
            inner,
            max_length=config.max_length,
            width=config.filter_width,
            depth=config.filter_depth,
            bands=config.filter_bands,
            frequency=config.frequency,
        )
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight of the newest input is a standard normal number a channel."""
        nn.init.normal_(self.D)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``conv [B, 3I, W-1]``, ``value [B, tokens, I]``)."""
        (channels,) = project_biased(x, self.in_proj)
        second, value, conv = self.conv(channels, None if state is None else state["conv"], mask)
        history = None if state is None else state["value"]
        taps = self.filter(lags_so_far(value, history))
        # D weighs the newest input, as the tap of lag 0 does: no pass over memory of its own.
        newest = self.D.to(taps.dtype)[:, None] + taps[:, :1]
        mixed, inputs = long_convolution(value, torch.cat([newest, taps[:, 1:]], dim=1), history=history, mask=mask)
        (y,) = project_biased((second * mixed).to(x.dtype), self.out_proj)
        return y, {"conv": conv, "value": inputs}
