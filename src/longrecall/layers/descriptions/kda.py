"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import TensorShapes, convolution, linear
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig


@dataclass(frozen=True)
class KDAConfig(LinearAttentionConfig):
    """Sizes of a Kimi Delta Attention layer; the published model has key_dim = value_dim = 128."""

    type: ClassVar[str] = "kda"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.kda:KDA"
    optional_fields: ClassVar[tuple[str, ...]] = ("value_heads", "lowest_decay")

    gate_rank: int | None = None
    """Inner width of the low-rank projections of the decay and of the output gate; None = value_dim."""
    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone)."""
    negative_eigenvalues: bool = False
    """beta in (0, 2) instead of (0, 1) (Grazzi et al. 2024)."""
    norm_eps: float = 1e-5
    value_heads: int | None = None
    """Value heads, a multiple of num_heads; each has a decay and a beta of its own. None = num_heads."""
    lowest_decay: float | None = None
    """The log decay of a token is a sigmoid times this number, below 0; None = it has no bound."""

    def __post_init__(self) -> None:
        if self.gate_rank is None:
            object.__setattr__(self, "gate_rank", self.value_dim)
        self._require_positive("num_heads", "key_dim", "value_dim", "gate_rank")
        if self.value_head_count < 1 or self.value_head_count % self.num_heads:
            raise UserError(
                f'mixer "{self.type}": value_heads ({self.value_heads}) must be a multiple of '
                f"num_heads ({self.num_heads})"
            )
        if self.lowest_decay is not None and not self.lowest_decay < 0:
            raise UserError(f'mixer "{self.type}": lowest_decay must be below 0, got {self.lowest_decay!r}')

    @property
    def value_head_count(self) -> int:
        return self.num_heads if self.value_heads is None else self.value_heads

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        heads, rank = self.value_head_count, int(self.gate_rank or self.value_dim)
        keys, values, gates = self.num_heads * self.key_dim, heads * self.value_dim, heads * self.key_dim
        shapes: TensorShapes = {"A_log": (heads,), "dt_bias": (gates,)}
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            shapes |= linear(f"{name}_proj", size, hidden_size) | convolution(f"{name}_conv", size, self.conv_width)
        return {
            **shapes,
            **linear("f_proj.0", rank, hidden_size),
            **linear("f_proj.1", gates, rank),
            **linear("b_proj", heads, hidden_size),
            **linear("g_proj.0", rank, hidden_size),
            **linear("g_proj.1", values, rank, bias=True),
            "o_norm.weight": (self.value_dim,),
            **linear("o_proj", hidden_size, values),
        }
