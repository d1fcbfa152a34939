"""Time mixing of RWKV-5 (Eagle) and RWKV-6 (Finch), Peng et al. 2024: their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear


@dataclass(frozen=True)
class RWKV5Config(MixerConfig):
    """Sizes of an RWKV-5 layer; the published models have heads of 64 that together are as wide as the model."""

    type: ClassVar[str] = "rwkv5"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.rwkv:RWKV5"
    mixes: ClassVar[int] = 4
    """Inputs that are mixed with the token before: those of r, k, v and the gate."""

    input_dim: int
    """Width of the layer's input, the model's hidden_size: the last input is a part of the state."""
    num_heads: int
    key_dim: int
    """Key width K of one head."""
    value_dim: int
    """Value width V of one head."""
    norm_eps: float = 64e-5
    """Of the norm of each head's output; the published models divide by 8 before a norm with 1e-5."""

    def __post_init__(self) -> None:
        self._require_positive("input_dim", "num_heads", "key_dim", "value_dim")

    def state_shapes(self) -> StateShapes:
        return {"recurrent": (self.num_heads, self.key_dim, self.value_dim), "shift": (self.input_dim, 1)}

    def check_hidden_size(self, hidden_size: int) -> None:
        if self.input_dim != hidden_size:
            raise UserError(
                f'mixer "{self.type}": input_dim ({self.input_dim}) must be the hidden_size of the model '
                f"({hidden_size})"
            )

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        self.check_hidden_size(hidden_size)
        return self.own_tensors(hidden_size) | self.projections(hidden_size)

    def own_tensors(self, hidden_size: int) -> TensorShapes:
        """What is no part of a projection; `mix` has a row for each mixed input."""
        keys = self.num_heads * self.key_dim
        return {"mix": (self.mixes, hidden_size), "decay": (keys,), "bonus": (self.num_heads, self.key_dim)}

    def projections(self, hidden_size: int) -> TensorShapes:
        """The linear maps, and the norm before the last one."""
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        return {
            **linear("r_proj", keys, hidden_size),
            **linear("k_proj", keys, hidden_size),
            **linear("v_proj", values, hidden_size),
            **linear("g_proj", values, hidden_size),
            "o_norm.weight": (values,),
            "o_norm.bias": (values,),
            **linear("o_proj", hidden_size, values),
        }


@dataclass(frozen=True)
class RWKV6Config(RWKV5Config):
    """Sizes of an RWKV-6 layer."""

    type: ClassVar[str] = "rwkv6"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.rwkv:RWKV6"
    mixes: ClassVar[int] = 5
    """The same, and that of the decay."""

    mix_rank: int = 32
    """Inner width R of each of the five low-rank maps that decide how far a token looks back."""
    decay_rank: int = 64
    """Inner width of the low-rank map of the decay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("mix_rank", "decay_rank")

    def own_tensors(self, hidden_size: int) -> TensorShapes:
        shift = {"mix_x": (hidden_size,), "mix_up": (self.mixes, self.mix_rank, hidden_size)}
        return super().own_tensors(hidden_size) | shift

    def projections(self, hidden_size: int) -> TensorShapes:
        return {
            **super().projections(hidden_size),
            **linear("mix_down", self.mixes * self.mix_rank, hidden_size),
            **linear("decay_down", self.decay_rank, hidden_size),
            **linear("decay_up", self.num_heads * self.key_dim, self.decay_rank),
        }
