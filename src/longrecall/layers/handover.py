"""Handover: the old mixer and its re-initialised successor side by side, the output moving from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longrecall.layers.mixers.base import LayerState, MixerConfig, StateShapes
from longrecall.layers.nested import read_nested
from longrecall.layers.tokens import TokenContext


@dataclass(frozen=True)
class HandoverConfig(MixerConfig):
    """Two mixers in one layer."""

    type: ClassVar[str] = "handover"
    nested: ClassVar[tuple[str, ...]] = ("old", "new")

    old: MixerConfig
    new: MixerConfig

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.type, "old": self.old.to_dict(), "new": self.new.to_dict()}

    def state_shapes(self) -> StateShapes:
        return {
            f"{path}.{name}": shape
            for path, config in (("old", self.old), ("new", self.new))
            for name, shape in config.state_shapes().items()
        }

    def build(self, hidden_size: int) -> Handover:
        return Handover(self, hidden_size)


class Handover(nn.Module):
    """y = (1 - progress) * old(x) + progress * new(x); exact at both ends and usable everywhere between."""

    progress: Tensor

    def __init__(self, config: HandoverConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.old = config.old.build(hidden_size)
        self.new = config.new.build(hidden_size)
        self.register_buffer("progress", torch.zeros((), dtype=torch.float32))

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        context: TokenContext | None = None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and both states, prefixed ``old.`` and ``new.``."""
        paths = ("old", "new")
        (old, new), after = read_nested(self, paths, x, state, mask=mask, position=position, context=context)
        share = self.progress.to(x.dtype)
        return old * (1 - share) + new * share, after
