"""Gated linear attention (Yang et al. 2024), with the merged heads of StateX as an option: its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import TensorShapes, linear
from longrecall.layers.descriptions.expansion import ExpansionConfig
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig


@dataclass(frozen=True)
class GLAConfig(LinearAttentionConfig):
    """Sizes of a GLA layer; the defaults are those of the published models."""

    type: ClassVar[str] = "gla"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.gla:GLA"

    gate_rank: int = 16
    """Inner width of the low-rank projection of the decay."""
    gate_divisor: float = 16.0
    """log decay = logsigmoid(projection) / gate_divisor."""
    conv_width: int = 0
    """Width of the short convolutions on q, k and v; 0 = none."""
    output_gate: bool = True
    """Multiply the normed output by silu of a projection of x."""
    merged: bool = False
    """Every key head writes the values of all heads, mixed by a learned [H, H] matrix (StateX)."""
    norm_eps: float = 1e-5
    expansion: ExpansionConfig | None = None
    """Wider queries and keys in subheads (layers/expansion.py); None = none."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim", "gate_rank")
        if self.merged and self.expansion:
            raise UserError(f'mixer "{self.type}": heads are either merged or expanded; leave out merged or expansion')

    def own_tensors(self) -> TensorShapes:
        return super().own_tensors() | ({"mixing": (self.num_heads, self.num_heads)} if self.merged else {})

    def gate_tensors(self, hidden_size: int) -> TensorShapes:
        down, up = (self.gate_rank, hidden_size), (self.key_channels, self.gate_rank)
        return linear("gk_proj.0", *down) | linear("gk_proj.1", *up, bias=True)
