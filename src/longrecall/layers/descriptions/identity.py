"""A block that adds its normed input: what stands where other models have an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes


@dataclass(frozen=True)
class IdentityConfig(MixerConfig):
    """No sizes and no weights: with its norm the block is x + norm(x).

    Zoology's block (Arora et al. 2023) without an MLP has such a second half.
    """

    type: ClassVar[str] = "identity"
    layer_class: ClassVar[str] = "torch.nn:Identity"
    positionwise: ClassVar[bool] = True

    def state_shapes(self) -> StateShapes:
        return {}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        return {}
