"""BaseConv (Arora et al. 2023, "Zoology"): a projection of the input times a causal convolution of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.base_conv import BaseConvConfig
from longrecall.layers.implicit_filter import ImplicitFilter
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.projections import project_biased
from longrecall.ops import long_convolution
from longrecall.ops.convolution.long import lags_so_far


class BaseConv(nn.Module):
    r"""y = (W u + b) * (h conv u + c), products by channel; there is no output projection.

    Its state are the last W - 1 inputs for an explicit filter of W taps; an implicit filter has no finite state and
    keeps every input, as attention keeps keys. An implicit filter has a weight of its own for the newest input (`skip`,
    1 at first), as in Zoology's, which is too sharp a peak for a smooth function of the lag.
    """

    def __init__(self, config: BaseConvConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        self.in_proj = nn.Linear(channels, channels)
        self.conv: ShortConvolution | None = None
        self.filter: ImplicitFilter | None = None
        if config.kernel is not None:
            self.conv = ShortConvolution(channels, config.kernel, bias=True, activation=None)
            self.register_parameter("skip", None)
            self.register_parameter("bias", None)
        else:
            self.filter = ImplicitFilter(
                channels,
                max_length=config.max_length,
                width=config.filter_width,
                depth=config.filter_depth,
                bands=config.filter_bands,
                frequency=config.frequency,
            )
            self.skip = nn.Parameter(torch.empty(channels))
            self.bias = nn.Parameter(torch.empty(channels))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """The implicit convolution starts with the newest input itself added to it; no bias."""
        if self.config.implicit:
            nn.init.ones_(self.skip)
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``conv [B, d, W-1]`` or ``value [B, tokens, d]``)."""
        (gate,) = project_biased(x, self.in_proj)
        if self.conv is not None:
            mixed, conv = self.conv(x, None if state is None else state["conv"], mask)
            return gate * mixed, {"conv": conv}
        assert self.filter is not None
        history = None if state is None else state["value"]
        taps = self.filter(lags_so_far(x, history))
        mixed, inputs = long_convolution(x, taps, history=history, mask=mask)
        mixed = mixed + x * self.skip + self.bias
        return gate * mixed, {"value": inputs}
