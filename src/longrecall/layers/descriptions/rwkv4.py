"""RWKV-4 (Peng et al. 2023), its time mixing, and the channel mixing of RWKV-4, RWKV-6 and RWKV-7: their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear


@dataclass(frozen=True)
class ShiftedConfig(MixerConfig):
    """Sizes of a layer that mixes each input with the one before, which is a part of its state."""

    input_dim: int
    """Width of the layer's input, the model's hidden_size."""
    inner_dim: int
    """Width I inside the layer."""

    def __post_init__(self) -> None:
        self._require_positive("input_dim", "inner_dim")

    def state_shapes(self) -> StateShapes:
        return {"shift": (self.input_dim, 1)}

    def check_hidden_size(self, hidden_size: int) -> None:
        if self.input_dim != hidden_size:
            raise UserError(
                f'mixer "{self.type}": input_dim ({self.input_dim}) must be the hidden_size of the model '
                f"({hidden_size})"
            )


@dataclass(frozen=True)
class RWKV4Config(ShiftedConfig):
    """Sizes of RWKV-4's time mixing; its inner width is attention_hidden_size."""

    type: ClassVar[str] = "rwkv4"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.rwkv4:RWKV4"

    def state_shapes(self) -> StateShapes:
        return {"recurrent": (1, 3, self.inner_dim), "shift": (self.input_dim, 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        self.check_hidden_size(hidden_size)
        return {
            **{f"mix_{name}": (hidden_size,) for name in "kvr"},
            "decay": (self.inner_dim,),
            "bonus": (self.inner_dim,),
            **linear("k_proj", self.inner_dim, hidden_size),
            **linear("v_proj", self.inner_dim, hidden_size),
            **linear("r_proj", self.inner_dim, hidden_size),
            **linear("o_proj", hidden_size, self.inner_dim),
        }


@dataclass(frozen=True)
class ChannelMixingConfig(ShiftedConfig):
    """Sizes of RWKV's channel mixing, which stands where other models have an MLP; I is intermediate_size."""

    layer_class: ClassVar[str] = "longrecall.layers.mixers.rwkv_channel:ChannelMixing"
    receptance: ClassVar[bool] = True
    """Whether the output is multiplied by the sigmoid of a projection."""
    share_of_present: ClassVar[bool] = False
    """Whether `mix_k` and `mix_r` are shares of the token itself (RWKV-4) and not of the one before."""

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        self.check_hidden_size(hidden_size)
        d, receptance = hidden_size, self.receptance
        return {
            "mix_k": (d,),
            **({"mix_r": (d,)} if receptance else {}),
            **linear("k_proj", self.inner_dim, d),
            **linear("v_proj", d, self.inner_dim),
            **(linear("r_proj", d, d) if receptance else {}),
        }


@dataclass(frozen=True)
class RWKV4ChannelConfig(ChannelMixingConfig):
    """Channel mixing of RWKV-4."""

    type: ClassVar[str] = "rwkv4_channel"
    share_of_present: ClassVar[bool] = True


@dataclass(frozen=True)
class RWKV6ChannelConfig(ChannelMixingConfig):
    """Channel mixing of RWKV-6."""

    type: ClassVar[str] = "rwkv6_channel"


@dataclass(frozen=True)
class RWKV7ChannelConfig(ChannelMixingConfig):
    """Channel mixing of RWKV-7: no receptance."""

    type: ClassVar[str] = "rwkv7_channel"
    receptance: ClassVar[bool] = False
