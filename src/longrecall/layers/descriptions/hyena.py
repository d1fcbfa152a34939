"""Hyena of order 2 (Poli et al. 2023): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import (
    MixerConfig,
    StateShapes,
    TensorShapes,
    convolution,
    implicit_filter,
    linear,
)


@dataclass(frozen=True)
class HyenaConfig(MixerConfig):
    """Sizes of a Hyena layer; the defaults are those of Zoology's."""

    type: ClassVar[str] = "hyena"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.hyena:Hyena"

    inner_dim: int
    """Width I of the gates and of the value; the published models take the hidden size."""
    conv_width: int = 3
    """Taps of the explicit filters on gates and value."""
    max_length: int = 1024
    """Lags over which the long filter is defined and fades: the length of the training sequences."""
    filter_width: int = 64
    """Hidden units of the filter's sine network."""
    filter_depth: int = 2
    """Hidden layers of it, after the first."""
    filter_bands: int = 1
    """Frequencies among the features of a lag."""
    frequency: float = 1.0
    """Initial frequency of the sines."""

    def __post_init__(self) -> None:
        self._require_positive("inner_dim", "conv_width", "max_length", "filter_width", "filter_depth", "filter_bands")

    def state_shapes(self) -> StateShapes:
        return {"conv": (3 * self.inner_dim, self.conv_width - 1), "value": (0, self.inner_dim)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        inner = self.inner_dim
        return {
            "D": (inner,),
            **linear("in_proj", 3 * inner, hidden_size, bias=True),
            **convolution("conv", 3 * inner, self.conv_width, bias=True),
            **implicit_filter("filter", inner, self.filter_width, self.filter_depth, self.filter_bands),
            **linear("out_proj", hidden_size, inner, bias=True),
        }
