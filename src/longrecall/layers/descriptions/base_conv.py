"""BaseConv (Arora et al. 2023, "Zoology"): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import (
    MixerConfig,
    StateShapes,
    TensorShapes,
    convolution,
    implicit_filter,
    linear,
)

DEFAULT_KERNEL = 3


@dataclass(frozen=True)
class BaseConvConfig(MixerConfig):
    """Sizes of a BaseConv layer.

    Zoology's MQAR models alternate layers of 3 explicit taps with implicit filters as long as the sequence; the default
    is the former.
    """

    type: ClassVar[str] = "base_conv"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.base_conv:BaseConv"

    channels: int
    """Channels of the convolution, which reads the input itself: the model's hidden_size."""
    kernel: int | None = None
    """Taps of an explicit filter; None = 3, or no explicit filter when `implicit`."""
    implicit: bool = False
    """A filter over the whole past, from a sine network."""
    max_length: int = 1024
    """Lags over which an implicit filter is defined and fades: the length of the training sequences."""
    filter_width: int = 16
    """Hidden units of the sine network."""
    filter_depth: int = 2
    """Hidden layers of it, after the first."""
    filter_bands: int = 1
    """Frequencies among the features of a lag."""
    frequency: float = 1.0
    """Initial frequency of the sines."""

    def __post_init__(self) -> None:
        if self.implicit and self.kernel is not None:
            raise UserError(
                f'mixer "{self.type}": kernel ({self.kernel}) is for an explicit filter; drop "kernel" or "implicit"'
            )
        if not self.implicit:
            object.__setattr__(self, "kernel", DEFAULT_KERNEL if self.kernel is None else self.kernel)
            self._require_positive("kernel")
        self._require_positive("channels", "max_length", "filter_width", "filter_depth", "filter_bands")

    def state_shapes(self) -> StateShapes:
        if self.kernel is None:
            return {"value": (0, self.channels)}
        return {"conv": (self.channels, self.kernel - 1)}

    def check_hidden_size(self, hidden_size: int) -> None:
        if self.channels != hidden_size:
            raise UserError(
                f'mixer "{self.type}": channels ({self.channels}) must be the model\'s hidden_size ({hidden_size})'
            )

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        self.check_hidden_size(hidden_size)
        channels, projection = self.channels, linear("in_proj", self.channels, self.channels, bias=True)
        if self.kernel is not None:
            return projection | convolution("conv", channels, self.kernel, bias=True)
        taps = implicit_filter("filter", channels, self.filter_width, self.filter_depth, self.filter_bands)
        return {"skip": (channels,), "bias": (channels,), **projection, **taps}
