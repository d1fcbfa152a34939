"""Mamba (Gu and Dao 2023): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear


@dataclass(frozen=True)
class MambaConfig(MixerConfig):
    """Sizes of a Mamba layer."""

    type: ClassVar[str] = "mamba"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.mamba:Mamba"

    inner_dim: int
    """Width I of x and of the gate z; expand * hidden_size in the published models."""
    state_dim: int
    """Numbers N of the state of one channel (d_state)."""
    dt_rank: int
    """Width R of the low-rank projection of the time steps; hidden_size / 16 in the published models."""
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive("inner_dim", "state_dim", "dt_rank", "conv_width")

    def state_shapes(self) -> StateShapes:
        # One head of N keys and I values, as far as shapes go; the decay differs for each of its numbers.
        return {"recurrent": (1, self.state_dim, self.inner_dim), "conv": (self.inner_dim, self.conv_width - 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        inner, keys = self.inner_dim, self.state_dim
        return {
            "A_log": (inner, keys),
            "D": (inner,),
            **linear("in_proj", 2 * inner, hidden_size, bias=self.proj_bias),
            **convolution("conv", inner, self.conv_width, bias=self.conv_bias),
            **linear("x_proj", self.dt_rank + 2 * keys, inner),
            **linear("dt_proj", inner, self.dt_rank, bias=True),
            **linear("out_proj", hidden_size, inner, bias=self.proj_bias),
        }
