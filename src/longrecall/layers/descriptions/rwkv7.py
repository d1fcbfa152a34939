"""Time mixing of RWKV-7 (Peng et al. 2025): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear

FIRST_VALUE = "first_value"
"""Under which a layer gives its values ``[B, T, H * V]`` to later ones."""


@dataclass(frozen=True)
class RWKV7Config(MixerConfig):
    """Sizes of an RWKV-7 layer; the published models have heads of 64 that together are as wide as the model."""

    type: ClassVar[str] = "rwkv7"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.rwkv7:RWKV7"
    optional_fields: ClassVar[tuple[str, ...]] = ("value_rank", "gives_values")

    input_dim: int
    """Width of the layer's input, the model's hidden_size: the last input is a part of the state."""
    num_heads: int
    key_dim: int
    """Key width K of one head."""
    value_dim: int
    """Value width V of one head."""
    decay_rank: int = 64
    """Inner width of the low-rank map of the decay."""
    rate_rank: int = 64
    """Inner width of the low-rank map of the in-context learning rate."""
    gate_rank: int = 128
    """Inner width of the low-rank map of the output gate."""
    norm_eps: float = 64e-5
    """Of the norm of each head's output."""
    value_rank: int | None = None
    """Inner width of the low-rank map by which the values of the layer that gives them are mixed in; None = none are.

    The published models do so in every layer but the first.
    """
    gives_values: bool = False
    """Whether later layers get the values of this one: the first layer of the published models."""

    def __post_init__(self) -> None:
        self._require_positive("input_dim", "num_heads", "key_dim", "value_dim")
        self._require_positive("decay_rank", "rate_rank", "gate_rank")
        if self.value_rank is not None:
            self._require_positive("value_rank")
        if not isinstance(self.gives_values, bool):
            raise UserError(f'mixer "{self.type}": gives_values must be true or false, got {self.gives_values!r}')

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The values of the first layer, where they are mixed in."""
        return () if self.value_rank is None else (FIRST_VALUE,)

    @property
    def gives(self) -> tuple[str, ...]:  # type: ignore[override]
        """The values of this layer, for later ones."""
        return (FIRST_VALUE,) if self.gives_values else ()

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
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        return {
            "mix": (6, hidden_size),
            **{name: (keys,) for name in ("decay", "rate")},
            **({"value_share": (values,)} if self.value_rank else {}),
            **{name: (keys,) for name in ("removal_scale", "rate_scale")},
            "bonus": (self.num_heads, self.key_dim),
            **linear("r_proj", keys, hidden_size),
            **linear("k_proj", keys, hidden_size),
            **linear("v_proj", values, hidden_size),
            **linear("decay_down", self.decay_rank, hidden_size),
            **linear("decay_up", keys, self.decay_rank),
            **linear("rate_down", self.rate_rank, hidden_size),
            **linear("rate_up", keys, self.rate_rank),
            **(linear("value_down", self.value_rank, hidden_size) if self.value_rank else {}),
            **(linear("value_up", values, self.value_rank) if self.value_rank else {}),
            **linear("gate_down", self.gate_rank, hidden_size),
            **linear("gate_up", values, self.gate_rank),
            "o_norm.weight": (values,),
            "o_norm.bias": (values,),
            **linear("o_proj", hidden_size, values),
        }
