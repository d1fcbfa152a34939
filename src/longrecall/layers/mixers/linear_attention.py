"""What GLA, RetNet, DeltaNet and Gated DeltaNet share: projections, short convolutions, subheads, output norm and gate.

With an expansion (layers/expansion.py) a layer has more state heads than value heads. State heads are ordered by key
head, then subhead, then value head of that key head, so that each key subhead serves neighbours, as the ops want it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from longrecall.errors import UserError
from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.expansion import ExpansionConfig
from longrecall.layers.mixers.base import LayerState, MixerConfig, StateShapes
from longrecall.layers.norm import RMSNorm, operand_dtype
from longrecall.layers.projections import project, project_gated
from longrecall.ops.delta_rule.subheads import share_values, sum_subheads


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


class LinearAttentionMixer(nn.Module):
    """Base of the linear-attention mixers: subclasses add their gates and call one recurrence."""

    def __init__(self, config: LinearAttentionConfig, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        keys, expansion = config.key_channels, config.expansion
        projected = keys if expansion and expansion.kind == "naive" else config.num_heads * config.key_dim
        values = config.value_head_count * config.value_dim
        self.key_heads, self.subheads = config.num_heads, config.subheads
        self.head_width, self.value_width = config.state_key_dim, config.value_dim
        self.q_proj = nn.Linear(hidden_size, projected, bias=False)
        self.k_proj = nn.Linear(hidden_size, projected, bias=False)
        sizes = (config.num_heads, config.key_dim, hidden_size)
        self.q_expand = expansion.build(*sizes) if expansion else None
        self.k_expand = expansion.build(*sizes) if expansion else None
        self.v_expand = None
        if expansion and expansion.grafted:
            self.subhead_scale = nn.Parameter(torch.ones(config.value_head_count, expansion.factor - 1))
        else:
            self.register_parameter("subhead_scale", None)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if config.output_gate else None
        self.q_conv = ShortConvolution(keys, config.conv_width) if config.conv_width else None
        self.k_conv = ShortConvolution(keys, config.conv_width) if config.conv_width else None
        self.v_conv = ShortConvolution(values, config.conv_width) if config.conv_width else None
        self.o_norm = RMSNorm(config.value_dim, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        """The products of x ``[B, T, d]``: q, k, v and, where a layer has them, g (gate), b (beta) and a (decay)."""
        maybe = {name: getattr(self, f"{name}_proj", None) for name in "qkvgba"}
        layers = {name: layer for name, layer in maybe.items() if layer is not None}
        # A number for each head of a token: their products cost what reading x costs.
        return project(x, layers, joined=sum(name in layers for name in "ba"))

    def heads(
        self, projected: dict[str, Tensor], x: Tensor, state: LayerState | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, LayerState]:
        """`projections` of x -> q, k ``[B, T, H * E, K]``, v ``[B, T, Hv, V]`` and the new convolution states."""
        results, new_state = [], {}
        for name in ("q", "k", "v"):
            y = projected[name]
            expand = getattr(self, f"{name}_expand")
            if expand is not None:
                y = expand(y.unflatten(-1, (self.key_heads, -1)), x).flatten(-2)
            convolution = getattr(self, f"{name}_conv")
            if convolution is not None:
                key = f"{name}_conv"
                y, new_state[key] = convolution(y, None if state is None else state[key], mask)
            results.append(y.unflatten(-1, (-1, self.value_width if name == "v" else self.head_width)))
        return results[0], results[1], results[2], new_state

    def share_values(self, v: Tensor) -> Tensor:
        """v ``[B, T, Hv, V]`` -> ``[B, T, Hv * E, V]``: every subhead of a head writes the same values."""
        return share_values(v, self.key_heads, self.subheads)

    def output_weights(self) -> Tensor | None:
        """Factors of the subheads' outputs ``[Hv, E]``; None = ones."""
        if self.subhead_scale is None:
            return None
        return torch.cat([torch.ones_like(self.subhead_scale[:, :1]), self.subhead_scale], dim=1)

    def sum_subheads(self, o: Tensor) -> Tensor:
        """o ``[B, T, Hv * E, V]`` -> ``[B, T, Hv, V]``, added up in float32 (the paper, equation 10)."""
        return sum_subheads(o, self.key_heads, self.subheads, self.output_weights())

    def output(self, o: Tensor, projected: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Sum over subheads, per-head norm, output gate and projection: o ``[B, T, Hv * E, V]`` -> ``[B, T, d]``."""
        return self.gated_output(self.sum_subheads(o), projected, dtype)

    def gated_output(self, o: Tensor, projected: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Per-head norm, output gate and projection: o ``[B, T, Hv, V]`` -> ``[B, T, d]``; `dtype` is that of x."""
        dtype = operand_dtype(o, dtype)
        if "g" in projected:
            return project_gated(o, self.o_norm, projected["g"], self.o_proj, dtype)
        y: Tensor = self.o_proj(self.o_norm(o, dtype).flatten(-2))
        return y


def mask_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero x ``[B, T, ...]`` at padded positions, which leaves the recurrent state as it was there."""
    return x if mask is None else x * mask.view(*mask.shape, *[1] * (x.dim() - 2))
