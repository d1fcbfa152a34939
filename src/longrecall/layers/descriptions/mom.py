"""Mixture of Memories (Du et al. 2025, arXiv 2502.13685): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear

RULES = ("gated_delta", "gated_linear")


@dataclass(frozen=True)
class MoMConfig(MixerConfig):
    """Sizes of a Mixture-of-Memories layer; the defaults are those of the paper's models."""

    type: ClassVar[str] = "mom"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.mom:MoM"
    optional_fields: ClassVar[tuple[str, ...]] = ("tied", "tied_projections")

    num_heads: int
    """Heads H of every memory."""
    key_dim: int
    """Key width K of one head."""
    value_dim: int
    """Value width V of one head."""
    memories: int = 4
    """Memories M that the router chooses from."""
    active: int = 2
    """How many of them a token is written to and read from."""
    shared: bool = True
    """One memory more, which every token uses."""
    rule: str = "gated_delta"
    """How a memory is updated: "gated_delta" (Gated DeltaNet's) or "gated_linear" (the same without the correction)."""
    conv_width: int = 4
    """Width of the short convolutions on q, k and v; 0 = none (SiLU alone)."""
    output_gate: bool = True
    balance: float = 0.01
    """Weight of the loss that makes all memories used alike; 0 = none."""
    norm_eps: float = 1e-5
    tied: bool = False
    """One `A_log`, one `dt_bias` and one set of convolutions for all memories, as in flash-linear-attention.

    Queries are then convolved within each memory's own sequence, and a single active memory has the weight 1.
    """
    tied_projections: bool = False
    """One projection to keys, values, decay and beta for all memories too."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim", "memories", "active")
        if self.active > self.memories:
            raise UserError(
                f'mixer "{self.type}": active ({self.active}) cannot be more than memories ({self.memories})'
            )
        if self.rule not in RULES:
            raise UserError(f'mixer "{self.type}": rule must be one of {", ".join(RULES)}, got {self.rule!r}')
        if isinstance(self.balance, bool) or not isinstance(self.balance, int | float) or not self.balance >= 0:
            raise UserError(f'mixer "{self.type}": balance must be a number from 0, got {self.balance!r}')

    @property
    def all_memories(self) -> int:
        """Memories with the shared one, which is the last."""
        return self.memories + int(self.shared)

    def state_shapes(self) -> StateShapes:
        heads, keys, values = self.num_heads, self.num_heads * self.key_dim, self.num_heads * self.value_dim
        shapes: StateShapes = {"recurrent": (self.all_memories * heads, self.key_dim, self.value_dim)}
        if self.conv_width:
            queries = self.all_memories if self.tied else 1
            sizes = {"q": queries * keys, "k": self.all_memories * keys, "v": self.all_memories * values}
            shapes |= {f"{name}_conv": (size, self.conv_width - 1) for name, size in sizes.items()}
        return shapes

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        heads = self.num_heads
        tied, count = (1 if one else self.all_memories for one in (self.tied, self.tied_projections))
        keys, values = heads * self.key_dim, heads * self.value_dim
        shapes: TensorShapes = {
            "A_log": (tied * heads,),
            "dt_bias": (tied * heads,),
            **linear("router", self.memories, hidden_size),
            **linear("q_proj", keys, hidden_size),
            **linear("k_proj", count * keys, hidden_size),
            **linear("v_proj", count * values, hidden_size),
            **linear("a_proj", count * heads, hidden_size),
            **(linear("b_proj", count * heads, hidden_size) if self.rule == "gated_delta" else {}),
        }
        for name, size in (("q", keys), ("k", tied * keys), ("v", tied * values)):
            shapes |= convolution(f"{name}_conv", size, self.conv_width)
        shapes |= linear("g_proj", values, hidden_size) if self.output_gate else {}
        return shapes | {"o_norm.weight": (self.value_dim,)} | linear("o_proj", hidden_size, values)

    def active_tensor_shapes(self, hidden_size: int) -> TensorShapes:
        shapes, used = self.tensor_shapes(hidden_size), self.active + int(self.shared)
        own = ("A_log", "dt_bias", "k_proj", "v_proj", "a_proj", "b_proj", "k_conv", "v_conv")
        return {
            name: (shape[0] // self.all_memories * used, *shape[1:]) if name.split(".")[0] in own else shape
            for name, shape in shapes.items()
        }
