"""H3 (Fu et al. 2023): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear


@dataclass(frozen=True)
class H3Config(MixerConfig):
    """Sizes of an H3 layer."""

    type: ClassVar[str] = "h3"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.h3:H3"

    num_heads: int
    """Heads H, each with a state space of its own."""
    head_dim: int
    """Width P of a head: it remembers P * P products of keys and values."""
    state_dim: int = 64
    """Numbers N a product is remembered by: N / 2 complex ones."""
    shift_dim: int | None = None
    """State of the shift on the keys, which are its taps; None = state_dim."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "head_dim", "state_dim")
        if self.state_dim % 2:
            raise UserError(f'mixer "{self.type}": state_dim must be even (complex numbers), got {self.state_dim}')
        if self.shift_dim is None:
            object.__setattr__(self, "shift_dim", self.state_dim)
        self._require_positive("shift_dim")

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values, H * P."""
        return self.num_heads * self.head_dim

    def state_shapes(self) -> StateShapes:
        recurrent = (self.num_heads, self.state_dim, self.head_dim**2)
        return {"recurrent": recurrent, "k_conv": (self.channels, int(self.shift_dim or 0) - 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        channels, heads, pairs = self.channels, self.num_heads, self.state_dim // 2
        return {
            "log_step": (heads,),
            "A_log": (heads, pairs),
            "A_imag": (heads, pairs),
            "C": (heads, pairs, 2),
            "D": (heads,),
            **linear("q_proj", channels, hidden_size, bias=True),
            **linear("k_proj", channels, hidden_size, bias=True),
            **linear("v_proj", channels, hidden_size, bias=True),
            **convolution("k_conv", channels, int(self.shift_dim or 0)),
            **linear("o_proj", hidden_size, channels, bias=True),
        }
