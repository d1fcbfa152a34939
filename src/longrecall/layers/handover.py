"""Handover: the old mixer and its re-initialised successor side by side, the output moving from one to the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.access import visitable
from longrecall.layers.descriptions.handover import HandoverConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.nested import read_nested
from longrecall.layers.tokens import TokenContext


class Handover(nn.Module):
    """y = (1 - progress) * old(x) + progress * new(x); exact at both ends and usable everywhere between."""

    progress: Tensor

    def __init__(self, config: HandoverConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.old = config.old.build(hidden_size)
        self.new = config.new.build(hidden_size)
        self.register_buffer("progress", torch.zeros((), dtype=torch.float32))

    @visitable
    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        context: TokenContext | None = None,
        **carried: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and both states, prefixed ``old.`` and ``new.``."""
        paths = ("old", "new")
        (old, new), after = read_nested(
            self, paths, x, state, mask=mask, position=position, context=context, carried=carried
        )
        share = self.progress.to(x.dtype)
        return old * (1 - share) + new * share, after
