"""Gated DeltaProduct (Siems et al. 2025): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear


@dataclass(frozen=True)
class GatedDeltaProductConfig(MixerConfig):
    """Sizes of a Gated DeltaProduct layer; with one step a token it is Gated DeltaNet."""

    type: ClassVar[str] = "gated_delta_product"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.gated_delta_product:GatedDeltaProduct"

    num_heads: int
    """Key heads H."""
    key_dim: int
    """Key width K of one head."""
    value_dim: int
    """Value width V of one head."""
    value_heads: int | None = None
    """Value heads, a multiple of num_heads; None = num_heads."""
    steps: int = 2
    """Steps of the delta rule that every token makes, each with a key, values and a beta of its own."""
    decay: bool = True
    """Whether the state fades before the first step of a token."""
    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone)."""
    output_gate: bool = True
    negative_eigenvalues: bool = True
    """beta in (0, 2) instead of (0, 1) (Grazzi et al. 2024)."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim", "steps")
        if self.value_head_count < 1 or self.value_head_count % self.num_heads:
            raise UserError(
                f'mixer "{self.type}": value_heads ({self.value_heads}) must be a multiple of '
                f"num_heads ({self.num_heads})"
            )

    @property
    def value_head_count(self) -> int:
        """Value heads, and heads of the state."""
        return self.num_heads if self.value_heads is None else self.value_heads

    def channels(self) -> dict[str, int]:
        """Channels of q, k and v, those of all steps."""
        keys, values = self.num_heads * self.key_dim, self.value_head_count * self.value_dim
        return {"q": keys, "k": self.steps * keys, "v": self.steps * values}

    def state_shapes(self) -> StateShapes:
        shapes: StateShapes = {"recurrent": (self.value_head_count, self.key_dim, self.value_dim)}
        if self.conv_width:
            shapes |= {f"{name}_conv": (size, self.conv_width - 1) for name, size in self.channels().items()}
        return shapes

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        heads, values = self.value_head_count, self.value_head_count * self.value_dim
        shapes: TensorShapes = {"A_log": (heads,), "dt_bias": (heads,)} if self.decay else {}
        for name, size in self.channels().items():
            shapes |= linear(f"{name}_proj", size, hidden_size) | convolution(f"{name}_conv", size, self.conv_width)
        shapes |= linear("b_proj", self.steps * heads, hidden_size)
        shapes |= linear("a_proj", heads, hidden_size) if self.decay else {}
        shapes |= linear("g_proj", values, hidden_size) if self.output_gate else {}
        return shapes | {"o_norm.weight": (self.value_dim,)} | linear("o_proj", hidden_size, values)
