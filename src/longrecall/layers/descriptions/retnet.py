"""RetNet's multi-scale retention (Sun et al. 2023): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import TensorShapes
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig


@dataclass(frozen=True)
class RetNetConfig(LinearAttentionConfig):
    """Sizes of a RetNet layer."""

    type: ClassVar[str] = "retnet"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.retnet:RetNet"

    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    conv_width: int = 0
    """Width of the short convolutions on q, k and v; 0 = none."""
    output_gate: bool = True
    merged: bool = False
    """Every key head writes the values of all heads, mixed by a learned [H, H] matrix (StateX)."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim")

    def own_tensors(self) -> TensorShapes:
        return super().own_tensors() | ({"mixing": (self.num_heads, self.num_heads)} if self.merged else {})
