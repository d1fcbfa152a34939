"""Handover: the old mixer and its re-initialised successor side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, under


@dataclass(frozen=True)
class HandoverConfig(MixerConfig):
    """Two mixers in one layer."""

    type: ClassVar[str] = "handover"
    layer_class: ClassVar[str] = "longrecall.layers.handover:Handover"
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

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        paths = {"old": self.old, "new": self.new}
        inner = [under(path, config.tensor_shapes(hidden_size)) for path, config in paths.items()]
        return {"progress": (), **inner[0], **inner[1]}
