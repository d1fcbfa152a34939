"""Channel mixing of RWKV-4, RWKV-6 and RWKV-7: an MLP that looks one token back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.rwkv4 import ChannelMixingConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.rwkv import token_shift


class ChannelMixing(nn.Module):
    r"""y = W_v relu(W_k x')^2, in RWKV-4 and RWKV-6 times :math:`\sigma(W_r x'')`.

    x' and x'' are mixtures of the token and the one before.
    """

    def __init__(self, config: ChannelMixingConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.mix_k = nn.Parameter(torch.empty(hidden_size))
        self.mix_r = nn.Parameter(torch.empty(hidden_size)) if config.receptance else None
        self.k_proj = nn.Linear(hidden_size, config.inner_dim, bias=False)
        self.v_proj = nn.Linear(config.inner_dim, hidden_size, bias=False)
        self.r_proj = nn.Linear(hidden_size, hidden_size, bias=False) if config.receptance else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The first channels take the token before, the last ones the token itself: halfway up in the authors' way."""
        channels = torch.arange(self.mix_k.shape[0], device=self.mix_k.device) / self.mix_k.shape[0]
        share = channels.sqrt() if self.config.share_of_present else 1 - channels.sqrt()
        for mix in (self.mix_k, self.mix_r):
            if mix is not None:
                mix.copy_(share)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``shift [B, d, 1]``)."""
        before, shift = token_shift(x, None if state is None else state["shift"], mask)
        y: Tensor = self.v_proj(F.relu(self.k_proj(self._mixed(x, before, self.mix_k))).square())
        if self.r_proj is not None and self.mix_r is not None:
            y = y * self.r_proj(self._mixed(x, before, self.mix_r)).sigmoid()
        return y, {"shift": shift}

    def _mixed(self, x: Tensor, before: Tensor, share: Tensor) -> Tensor:
        if self.config.share_of_present:
            x, before = before, x
        return x + (before - x) * share
