"""DeltaNet (Yang et al. 2024b) and Gated DeltaNet (Yang et al. 2025): their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import TensorShapes, linear
from longrecall.layers.descriptions.expansion import ExpansionConfig
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig


@dataclass(frozen=True)
class DeltaNetConfig(LinearAttentionConfig):
    """Sizes of a DeltaNet layer."""

    type: ClassVar[str] = "delta_net"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.delta_net:DeltaNet"

    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone on q and k)."""
    output_gate: bool = False
    negative_eigenvalues: bool = False
    """beta in (0, 2) instead of (0, 1) (Grazzi et al. 2024)."""
    norm_eps: float = 1e-5
    expansion: ExpansionConfig | None = None
    """Wider queries and keys in subheads (layers/expansion.py); None = none."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim")

    def gate_tensors(self, hidden_size: int) -> TensorShapes:
        return linear("b_proj", self.state_heads, hidden_size)


@dataclass(frozen=True)
class GatedDeltaNetConfig(LinearAttentionConfig):
    """Sizes of a Gated DeltaNet layer."""

    type: ClassVar[str] = "gated_delta_net"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.delta_net:GatedDeltaNet"

    value_heads: int | None = None
    """Value heads, a multiple of num_heads; None = num_heads."""
    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone)."""
    output_gate: bool = True
    negative_eigenvalues: bool = False
    """beta in (0, 2) instead of (0, 1) (Grazzi et al. 2024)."""
    norm_eps: float = 1e-5
    expansion: ExpansionConfig | None = None
    """Wider queries and keys in subheads (layers/expansion.py); None = none."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim")
        if self.value_head_count < 1 or self.value_head_count % self.num_heads:
            raise UserError(
                f'mixer "{self.type}": value_heads ({self.value_heads}) must be a multiple of '
                f"num_heads ({self.num_heads})"
            )

    @property
    def value_head_count(self) -> int:
        return self.num_heads if self.value_heads is None else self.value_heads

    def own_tensors(self) -> TensorShapes:
        return super().own_tensors() | {"A_log": (self.state_heads,), "dt_bias": (self.state_heads,)}

    def gate_tensors(self, hidden_size: int) -> TensorShapes:
        return linear("b_proj", self.state_heads, hidden_size) | linear("a_proj", self.state_heads, hidden_size)
