"""Mamba (Gu and Dao 2023): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import (
    CONV_ACTIVATIONS,
    MixerConfig,
    StateShapes,
    TensorShapes,
    convolution,
    linear,
)

INPUT_NORMS = ("none", "plain", "weighted")
"""RMS norms of the low-rank time step, of B and of C: none, without weights (Falcon-Mamba), with weights (Jamba)."""


@dataclass(frozen=True)
class MambaConfig(MixerConfig):
    """Sizes of a Mamba layer."""

    type: ClassVar[str] = "mamba"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.mamba:Mamba"
    optional_fields: ClassVar[tuple[str, ...]] = ("input_norms", "norm_eps", "conv_activation", "out_proj")

    inner_dim: int
    """Width I of x and of the gate z; expand * hidden_size in the published models."""
    state_dim: int
    """Numbers N of the state of one channel (d_state)."""
    dt_rank: int
    """Width R of the low-rank projection of the time steps; hidden_size / 16 in the published models."""
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    input_norms: str = "none"
    """Norms of what the scan is given, one of `INPUT_NORMS`."""
    norm_eps: float = 1e-6
    """Added to the mean of the squares in these norms."""
    conv_activation: str = "silu"
    """What follows the convolution, one of `CONV_ACTIVATIONS`."""
    out_proj: bool = True
    """Whether the gated output is projected to the model's width. Without, it is a branch of `hymba`, which does so."""

    def __post_init__(self) -> None:
        self._require_positive("inner_dim", "state_dim", "dt_rank", "conv_width")
        self._require_one_of("input_norms", INPUT_NORMS)
        self._require_one_of("conv_activation", CONV_ACTIVATIONS)

    def output_size(self, hidden_size: int) -> int:
        return hidden_size if self.out_proj else self.inner_dim

    def state_shapes(self) -> StateShapes:
        # One head of N keys and I values, as far as shapes go; the decay differs for each of its numbers.
        return {"recurrent": (1, self.state_dim, self.inner_dim), "conv": (self.inner_dim, self.conv_width - 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        inner, keys = self.inner_dim, self.state_dim
        norms = {"dt_norm.weight": (self.dt_rank,), "b_norm.weight": (keys,), "c_norm.weight": (keys,)}
        return {
            "A_log": (inner, keys),
            "D": (inner,),
            **linear("in_proj", 2 * inner, hidden_size, bias=self.proj_bias),
            **convolution("conv", inner, self.conv_width, bias=self.conv_bias),
            **linear("x_proj", self.dt_rank + 2 * keys, inner),
            **(norms if self.input_norms == "weighted" else {}),
            **linear("dt_proj", inner, self.dt_rank, bias=True),
            **(linear("out_proj", hidden_size, inner, bias=self.proj_bias) if self.out_proj else {}),
        }
