"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import TensorShapes, linear
from longrecall.layers.descriptions.expansion import ExpansionConfig
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig


@dataclass(frozen=True)
class KDAConfig(LinearAttentionConfig):
    """Sizes of a Kimi Delta Attention layer; the published model has key_dim = value_dim = 128."""

    type: ClassVar[str] = "kda"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.kda:KDA"
    optional_fields: ClassVar[tuple[str, ...]] = ("gate_bias", "decay_floor")

    gate_rank: int | None = None
    """Inner width of the low-rank projections of the decay and of the output gate; None = value_dim."""
    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone)."""
    negative_eigenvalues: bool = False
    """beta in (0, 2) instead of (0, 1) (Grazzi et al. 2024)."""
    norm_eps: float = 1e-5
    gate_bias: bool = True
    """Whether the output gate's projection has a bias; the published Kimi-Linear models have none."""
    decay_floor: float | None = None
    """The lowest log decay of a token, below 0: the decay is then a sigmoid between it and 0. None = no floor."""
    expansion: ExpansionConfig | None = None
    """Wider queries and keys in subheads (layers/expansion.py); None = none."""

    def __post_init__(self) -> None:
        if self.gate_rank is None:
            object.__setattr__(self, "gate_rank", self.value_dim)
        self._require_positive("num_heads", "key_dim", "value_dim", "gate_rank")
        floor = self.decay_floor
        if floor is not None and (isinstance(floor, bool) or not isinstance(floor, int | float) or not floor < 0):
            raise UserError(f'mixer "kda": decay_floor must be a number below 0, got {floor!r}')

    @property
    def inner_rank(self) -> int:
        """`gate_rank`, which is never None once the description is checked."""
        return self.value_dim if self.gate_rank is None else self.gate_rank

    def own_tensors(self) -> TensorShapes:
        return super().own_tensors() | {"A_log": (self.state_heads,), "dt_bias": (self.key_channels,)}

    def gate_tensors(self, hidden_size: int) -> TensorShapes:
        rank = self.inner_rank
        return {
            **linear("f_proj.0", rank, hidden_size),
            **linear("f_proj.1", self.key_channels, rank),
            **linear("b_proj", self.state_heads, hidden_size),
            **linear("g_proj.0", rank, hidden_size),
            **linear("g_proj.1", self.num_heads * self.value_dim, rank, bias=self.gate_bias),
        }
