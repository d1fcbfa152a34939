"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import TensorShapes, convolution, linear
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig


@dataclass(frozen=True)
class KDAConfig(LinearAttentionConfig):
    """Sizes of a Kimi Delta Attention layer; the published model has key_dim = value_dim = 128."""

    type: ClassVar[str] = "kda"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.kda:KDA"

    gate_rank: int | None = None
    """Inner width of the low-rank projections of the decay and of the output gate; None = value_dim."""
    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone)."""
    negative_eigenvalues: bool = False
    """beta in (0, 2) instead of (0, 1) (Grazzi et al. 2024)."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.gate_rank is None:
            object.__setattr__(self, "gate_rank", self.value_dim)
        self._require_positive("num_heads", "key_dim", "value_dim", "gate_rank")

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        heads, rank = self.num_heads, int(self.gate_rank or self.value_dim)
        keys, values = heads * self.key_dim, heads * self.value_dim
        shapes: TensorShapes = {"A_log": (heads,), "dt_bias": (keys,)}
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            shapes |= linear(f"{name}_proj", size, hidden_size) | convolution(f"{name}_conv", size, self.conv_width)
        return {
            **shapes,
            **linear("f_proj.0", rank, hidden_size),
            **linear("f_proj.1", keys, rank),
            **linear("b_proj", heads, hidden_size),
            **linear("g_proj.0", rank, hidden_size),
            **linear("g_proj.1", values, rank, bias=True),
            "o_norm.weight": (self.value_dim,),
            **linear("o_proj", hidden_size, values),
        }
