"""Softmax attention with rotary embeddings and an optional sliding window: its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Sizes of a softmax-attention layer."""

    type: ClassVar[str] = "attention"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.attention:Attention"

    optional_fields: ClassVar[tuple[str, ...]] = ("meta_tokens",)

    num_heads: int
    head_dim: int
    kv_heads: int | None = None
    """Key-value heads, a divisor of num_heads; None = num_heads."""
    window: int | None = None
    """A token sees this many tokens, itself included; None = all before it."""
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    meta_tokens: int = 0
    """Learned keys and values M that every token sees, whatever the window; 0 = none."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "head_dim")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.num_heads)
        self._require_positive("kv_heads", *(["window"] if self.window is not None else []))
        self._require_multiple("num_heads", "kv_heads")
        if not isinstance(self.meta_tokens, int) or isinstance(self.meta_tokens, bool) or self.meta_tokens < 0:
            raise UserError(f'mixer "{self.type}": meta_tokens must be a whole number >= 0, got {self.meta_tokens!r}')

    def state_shapes(self) -> StateShapes:
        shape = (0, int(self.kv_heads or 0), self.head_dim)
        return {"key": shape, "value": shape, "position": (0,)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        queries, keys, bias = self.num_heads * self.head_dim, int(self.kv_heads or 0) * self.head_dim, self.qkv_bias
        meta = (self.meta_tokens, int(self.kv_heads or 0), self.head_dim)
        return {
            **({"meta_key": meta, "meta_value": meta} if self.meta_tokens else {}),
            **linear("q_proj", queries, hidden_size, bias=bias),
            **linear("k_proj", keys, hidden_size, bias=bias),
            **linear("v_proj", keys, hidden_size, bias=bias),
            **linear("o_proj", hidden_size, queries),
        }

    def why_no_room(self) -> str | None:
        return None

    def columns_for(self, room: int) -> int:
        """Columns of the cache of a step with room for so many tokens."""
        # Twice a window: the columns that a state brings, at most one less than it, and as many again.
        return room if self.window is None else min(room, 2 * self.window)
