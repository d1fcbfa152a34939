"""What GLA, RetNet, DeltaNet, Gated DeltaNet and KDA share: projections, convolutions, subheads, output norm and gate.

With an expansion (layers/expansion.py) a layer has more state heads than value heads. State heads are ordered by key
head, then subhead, then value head of that key head, so that each key subhead serves neighbours, as the ops want it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.linear_attention import LinearAttentionConfig
from longrecall.layers.expansion import build_expander
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.norm import RMSNorm, operand_dtype
from longrecall.layers.projections import project, project_gated
from longrecall.ops.delta_rule.subheads import share_values, sum_subheads


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
        self.q_expand = build_expander(expansion, *sizes) if expansion else None
        self.k_expand = build_expander(expansion, *sizes) if expansion else None
        self.v_expand = None
        if expansion and expansion.grafted:
            self.subhead_scale = nn.Parameter(torch.ones(config.value_head_count, expansion.factor - 1))
        else:
            self.register_parameter("subhead_scale", None)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.g_proj: nn.Module | None = nn.Linear(hidden_size, values, bias=False) if config.output_gate else None
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
