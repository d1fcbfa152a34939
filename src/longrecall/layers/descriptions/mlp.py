"""The MLP beside a token mixer: its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear


@dataclass(frozen=True)
class MLPConfig(MixerConfig):
    """Sizes of an MLP; with its defaults a SwiGLU (Shazeer 2020)."""

    type: ClassVar[str] = "mlp"
    layer_class: ClassVar[str] = "longrecall.layers.mlp:build_mlp"
    positionwise: ClassVar[bool] = True

    inner_size: int
    """Width of the inner layer."""

    def __post_init__(self) -> None:
        self._require_positive("inner_size")

    def state_shapes(self) -> StateShapes:
        return {}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        return {
            **linear("gate_proj", self.inner_size, hidden_size),
            **linear("up_proj", self.inner_size, hidden_size),
            **linear("down_proj", hidden_size, self.inner_size),
        }
