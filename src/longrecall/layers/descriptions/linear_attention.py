"""What GLA, RetNet, DeltaNet, Gated DeltaNet and KDA share: heads, short convolutions, subheads, output norm and gate.

With an expansion (expansion.py) a layer has more state heads than value heads. State heads are ordered by key head,
then subhead, then value head of that key head, so that each key subhead serves neighbours, as the ops want it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear, under
from longrecall.layers.descriptions.expansion import ExpansionConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class LinearAttentionConfig(MixerConfig):
    """Sizes that every linear-attention mixer has."""

    num_heads: int
    """Key heads H."""
    key_dim: int
    """Key width K of one head."""
    value_dim: int
    """Value width V of one head."""

    @property
    def value_head_count(self) -> int:
        """Value heads; equal to `num_heads` unless a family shares keys."""
        return self.num_heads

    # Families that have one of these options declare a field of its name, which takes the place of the property.

    @property
    def conv_width(self) -> int:
        """Width of the short convolutions on q, k and v; 0 = none."""
        return 0

    @property
    def output_gate(self) -> bool:
        """Whether the output norm is multiplied by silu of a projection of x."""
        return False

    @property
    def expansion(self) -> ExpansionConfig | None:
        """How queries and keys are widened; None = not at all."""
        return None

    @property
    def merged(self) -> bool:
        """Whether every key head writes the values of all heads."""
        return False

    @property
    def value_heads(self) -> int | None:
        """Value heads, where a family lets several of them share keys; None = `num_heads`."""
        return None

    @property
    def subheads(self) -> int:
        """Subheads E of every key head; 1 = the head is whole."""
        return self.expansion.split if self.expansion else 1

    @property
    def state_heads(self) -> int:
        """Heads of the state: value heads times subheads."""
        return self.value_head_count * self.subheads

    @property
    def state_key_dim(self) -> int:
        """Key width of one state head."""
        return self.key_dim * (self.expansion.factor // self.subheads if self.expansion else 1)

    @property
    def key_channels(self) -> int:
        """Channels of all queries (or keys) as they enter the convolution and the recurrence."""
        return self.num_heads * self.subheads * self.state_key_dim

    def without_more_heads(self) -> Self:
        """This config, with an expansion of kind "heads" carried out: more heads and no expansion."""
        if self.expansion is None or self.expansion.kind != "heads":
            return self
        factor = self.expansion.factor
        changes: dict[str, Any] = {"num_heads": factor * self.num_heads, "expansion": None}
        if self.value_heads is not None:
            changes["value_heads"] = factor * self.value_head_count
        return replace(self, **changes)

    def state_shapes(self) -> StateShapes:
        plain = self.without_more_heads()
        if plain is not self:
            return plain.state_shapes()
        width = self.value_dim * (self.value_head_count if self.merged else 1)
        shapes: StateShapes = {"recurrent": (self.state_heads, self.state_key_dim, width)}
        if self.conv_width:
            keys, values = self.key_channels, self.value_head_count * self.value_dim
            shapes |= {
                f"{name}_conv": (size, self.conv_width - 1) for name, size in (("q", keys), ("k", keys), ("v", values))
            }
        return shapes

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        plain = self.without_more_heads()
        if plain is not self:
            return plain.tensor_shapes(hidden_size)
        return {**self.own_tensors(), **self.projections(hidden_size), **self.gate_tensors(hidden_size)}

    def build(self, hidden_size: int) -> nn.Module:
        plain = self.without_more_heads()
        return super().build(hidden_size) if plain is self else plain.build(hidden_size)

    def own_tensors(self) -> TensorShapes:
        """What is no part of a projection, a convolution or a norm."""
        grafted = self.expansion is not None and self.expansion.grafted
        return {"subhead_scale": (self.value_head_count, self.subheads - 1)} if grafted else {}

    def gate_tensors(self, hidden_size: int) -> TensorShapes:
        """What a family computes decay and beta with."""
        return {}

    def projections(self, hidden_size: int) -> TensorShapes:
        """Queries, keys and values with their expansions and convolutions; the output gate, norm and projection."""
        keys, expansion = self.key_channels, self.expansion
        projected = keys if expansion and expansion.kind == "naive" else self.num_heads * self.key_dim
        values, shapes = self.value_head_count * self.value_dim, TensorShapes()
        for name in "qk":
            shapes |= linear(f"{name}_proj", projected, hidden_size)
        made = expansion.tensor_shapes(self.num_heads, self.key_dim, hidden_size) if expansion else {}
        for name in "qk":
            shapes |= under(f"{name}_expand", made)
        for name in "vg" if self.output_gate else "v":
            shapes |= linear(f"{name}_proj", values, hidden_size)
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            shapes |= convolution(f"{name}_conv", size, self.conv_width)
        return shapes | {"o_norm.weight": (self.value_dim,)} | linear("o_proj", hidden_size, values)

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Self:
        given = description.get("expansion")
        if given is not None and "expansion" in cls.__dataclass_fields__ and not isinstance(given, ExpansionConfig):
            try:
                description = {**description, "expansion": ExpansionConfig.from_dict(given)}
            except UserError as error:
                raise UserError(f'mixer "{cls.type}": {error}') from None
        return super().from_dict(description)

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        # Left away when there is none: descriptions of models without it, and their fingerprints, stay as they were.
        expansion = data.pop("expansion", None)
        return data if expansion is None else {**data, "expansion": expansion.to_dict()}
