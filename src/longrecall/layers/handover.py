"""Handover: the old mixer and its re-initialised successor side by side, the output moving from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longrecall.layers.mixers.base import LayerState, MixerConfig, StateShapes


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
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and both states, prefixed ``old.`` and ``new.``."""
        outputs, new_state = [], {}
        for path in ("old", "new"):
            y, after = getattr(self, path)(x, _under(state, path), mask=mask, position=position)
            outputs.append(y)
            new_state.update({f"{path}.{name}": tensor for name, tensor in after.items()})
        share = self.progress.to(x.dtype)
        return outputs[0] * (1 - share) + outputs[1] * share, new_state


def _under(state: LayerState | None, path: str) -> LayerState | None:
    if state is None:
        return None
    prefix = f"{path}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
