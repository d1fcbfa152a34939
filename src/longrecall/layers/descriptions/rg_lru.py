"""The recurrent block of Griffin and RecurrentGemma (De et al. 2024): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear

ACTIVATIONS = ("gelu_tanh", "gelu", "silu")


@dataclass(frozen=True)
class RGLRUConfig(MixerConfig):
    """Sizes of a layer of real-gated linear recurrent units."""

    type: ClassVar[str] = "rg_lru"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.rg_lru:RGLRU"
    optional_fields: ClassVar[tuple[str, ...]] = ("activation",)

    inner_dim: int
    """Width I of the recurrence; hidden_size in the published models."""
    num_heads: int
    """Blocks of channels that the two gates are computed from, each by a map of its own."""
    conv_width: int = 4
    activation: str = "gelu_tanh"
    """Of the output gate: "gelu_tanh" (GELU by its tanh formula), "gelu" or "silu"."""

    def __post_init__(self) -> None:
        self._require_positive("inner_dim", "num_heads", "conv_width")
        self._require_multiple("inner_dim", "num_heads")
        if self.activation not in ACTIVATIONS:
            raise UserError(
                f'mixer "{self.type}": activation must be one of {", ".join(ACTIVATIONS)}, got {self.activation!r}'
            )

    def state_shapes(self) -> StateShapes:
        # One head of one key and I values, as far as shapes go.
        return {"recurrent": (1, 1, self.inner_dim), "conv": (self.inner_dim, self.conv_width - 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        inner, width = self.inner_dim, self.inner_dim // self.num_heads
        return {
            "decay": (inner,),
            "input_gate_weight": (self.num_heads, width, width),
            "input_gate_bias": (self.num_heads, width),
            "decay_gate_weight": (self.num_heads, width, width),
            "decay_gate_bias": (self.num_heads, width),
            **linear("in_proj", inner, hidden_size, bias=True),
            **linear("gate_proj", inner, hidden_size, bias=True),
            **convolution("conv", inner, self.conv_width, bias=True),
            **linear("out_proj", hidden_size, inner, bias=True),
        }
