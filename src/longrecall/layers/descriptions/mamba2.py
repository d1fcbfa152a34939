"""Mamba-2 (Dao and Gu 2024): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear

_NO_LIMIT = 1e18
"""A time step is never as long: every upper limit from here on means that there is none."""


@dataclass(frozen=True)
class Mamba2Config(MixerConfig):
    """Sizes of a Mamba-2 layer."""

    type: ClassVar[str] = "mamba2"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.mamba2:Mamba2"

    inner_dim: int
    """Width I of x and of the gate z; expand * hidden_size in the published models."""
    head_dim: int
    """Value width P of one head; I / P heads."""
    state_dim: int
    """Key width N (d_state)."""
    groups: int = 1
    """Groups G of heads that share B and C."""
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_limit: tuple[float, float | None] = (0.0, None)
    """Smallest and largest time step after the softplus; None = no upper limit, as is read from 1e18 on."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self._require_positive("inner_dim", "head_dim", "state_dim", "groups", "conv_width")
        self._require_multiple("inner_dim", "head_dim")
        self._require_multiple("num_heads", "groups")
        low, high = self.time_step_limit
        # Compared before it is converted: a whole number may be larger than any float.
        limits = (float(low), None if high is None or high >= _NO_LIMIT else float(high))
        object.__setattr__(self, "time_step_limit", limits)

    @property
    def num_heads(self) -> int:
        """Value heads, I / P."""
        return self.inner_dim // self.head_dim

    def state_shapes(self) -> StateShapes:
        channels = self.inner_dim + 2 * self.groups * self.state_dim
        return {"recurrent": (self.num_heads, self.state_dim, self.head_dim), "conv": (channels, self.conv_width - 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        inner, heads, convolved = self.inner_dim, self.num_heads, self.inner_dim + 2 * self.groups * self.state_dim
        return {
            **{name: (heads,) for name in ("dt_bias", "A_log", "D")},
            **linear("in_proj", inner + convolved + heads, hidden_size, bias=self.proj_bias),
            **convolution("conv", convolved, self.conv_width, bias=self.conv_bias),
            "norm.weight": (inner,),
            **linear("out_proj", hidden_size, inner, bias=self.proj_bias),
        }
