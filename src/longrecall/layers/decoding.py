"""One decoding step of a layer in few kernels, on state buffers that the caller owns and that are updated in place.

`fused_step(mixer)` returns the step of a mixer that has one; every other mixer runs its own forward pass on one token
(`plain_step`). The residual stream does the norms and products, fused as far as the batch size makes it worth while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.mixers.delta_net import DeltaNet, GatedDeltaNet
from longrecall.layers.mixers.gla import GLA
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer
from longrecall.layers.mixers.mamba2 import Mamba2
from longrecall.layers.mixers.retnet import RetNet
from longrecall.layers.mlp import SwiGLU
from longrecall.layers.norm import RMSNorm
from longrecall.layers.rotary import apply_rotary

Buffers = Mapping[str, Tensor]
"""State tensors of one layer; convolution states are stored ``[B, W - 1, C]`` and seen as ``[B, C, W - 1]``."""

LARGEST_KEY = 1024
"""Key width that one program of the recurrence kernel holds."""

FEW_ROWS = 4
"""Up to this batch size products are fused with what stands around them; beyond, a library's are faster."""


class Stream:
    """The residual stream ``[B, d]`` of one decoding step, in plain torch.

    Norms and products are asked for through it, so that they can be fused with each other.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        self.x, self.dtype = x, dtype

    def normed(self, norm: RMSNorm) -> Tensor:
        """The normed stream ``[B, d]`` in the weights' dtype."""
        normed: Tensor = norm(self.x)
        return normed.to(self.dtype)

    def add(self, y: Tensor) -> None:
        """Add a layer's output ``[B, d]``."""
        self.x += y

    def project(self, norm: RMSNorm, weights: list[Tensor]) -> list[Tensor]:
        """The normed stream times each weight ``[n, d]`` -> ``[B, n]``."""
        x = self.normed(norm)
        return [F.linear(x, weight) for weight in weights]

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        """Add weight ``[d, n]`` times y ``[B, n]``."""
        self.add(F.linear(y, weight))

    def add_mlp(self, norm: RMSNorm, mlp: SwiGLU) -> None:
        """Add the MLP of the normed stream."""
        self.add(mlp(self.normed(norm)))


class FusedStream(Stream):
    """The same in kernels: an output is added together with the next norm."""

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        super().__init__(x, dtype)
        self.update: Tensor | None = None

    def normed(self, norm: RMSNorm) -> Tensor:
        from longrecall.ops.decoding.triton.elementwise import add_norm

        out = torch.empty_like(self.x, dtype=self.dtype)
        update, self.update = self.update, None
        return add_norm(self.x, update, norm.weight, norm.eps, out)

    def add(self, y: Tensor) -> None:
        if self.update is not None:
            self.x += self.update
        self.update = y

    def add_mlp(self, norm: RMSNorm, mlp: SwiGLU) -> None:
        from longrecall.ops.decoding.triton.elementwise import silu_product

        x = self.normed(norm)
        self.add(mlp.down_proj(silu_product(mlp.gate_proj(x), mlp.up_proj(x))))


class FewRowsStream(FusedStream):
    """The same for a handful of rows: norms and additions happen inside the products."""

    def project(self, norm: RMSNorm, weights: list[Tensor]) -> list[Tensor]:
        from longrecall.ops.decoding.triton.products import norm_and_project

        self._settle()
        return norm_and_project(self.x, norm.weight, norm.eps, weights)

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        from longrecall.ops.decoding.triton.products import add_product

        self._settle()
        add_product(y, weight, self.x)

    def add_mlp(self, norm: RMSNorm, mlp: SwiGLU) -> None:
        from longrecall.ops.decoding.triton.products import norm_and_gate_up

        self._settle()
        y = norm_and_gate_up(self.x, norm.weight, norm.eps, mlp.gate_proj.weight, mlp.up_proj.weight)
        self.add_product(y, mlp.down_proj.weight)

    def _settle(self) -> None:
        if self.update is not None:
            self.x += self.update
            self.update = None


Step = Callable[[Stream, RMSNorm, Buffers, Tensor], None]
"""stream, the layer's norm, its buffers, position ``[B]``: adds the mixer's output to the stream."""


def fused_step(mixer: nn.Module) -> Step | None:
    """The step in fused kernels, or None for a mixer (or sizes, or a dtype) that they do not cover."""
    if next(mixer.parameters()).dtype == torch.float64:
        return None
    if isinstance(mixer, LinearAttentionMixer) and mixer.head_width <= LARGEST_KEY:
        return partial(_linear_attention, mixer)
    if isinstance(mixer, Mamba2) and not mixer.config.proj_bias:
        return partial(_mamba2, mixer)
    return None


def plain_step(mixer: nn.Module) -> Step:
    """The mixer's own forward pass; its new state is copied over the old one."""

    def step(stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor) -> None:
        y, after = mixer(stream.normed(norm)[:, None], dict(buffers), mask=None, position=position)
        for name, tensor in after.items():
            buffers[name].copy_(tensor)
        stream.add(y[:, 0])

    return step


def _linear_attention(
    mixer: LinearAttentionMixer, stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor
) -> None:
    """GLA, RetNet, DeltaNet and Gated DeltaNet, expanded and merged ones included."""
    from longrecall.ops.decoding.triton.elementwise import gated_norm
    from longrecall.ops.decoding.triton.recurrence import recurrence

    state = buffers["recurrent"]
    names = [name for name in ("q", "k", "v", "g", "b", "a") if getattr(mixer, f"{name}_proj", None) is not None]
    weights = [getattr(mixer, f"{name}_proj").weight for name in names]
    weights += [mixer.gk_proj[0].weight] if isinstance(mixer, GLA) else []
    projected = stream.project(norm, weights)
    parts = dict(zip(names, projected, strict=False))
    x = stream.normed(norm)[:, None] if getattr(mixer.q_expand, "reads_input", False) else None
    q, k, v = _convolved(mixer, [_expanded(mixer, name, parts[name], x) for name in ("q", "k", "v")], buffers)
    options: dict[str, Any] = {}
    if isinstance(mixer, DeltaNet):
        options = {"beta": parts["b"], "normalise": True}
        options["beta_factor"] = 2.0 if mixer.config.negative_eigenvalues else 1.0
        if not mixer.config.conv_width:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
    if isinstance(mixer, RetNet):
        q, k = (_rotated(mixer, y, position) for y in (q, k))
    merged = state.shape[-1] != mixer.value_width
    value_heads = v.shape[1] // mixer.value_width
    o = recurrence(
        q,
        k,
        v,
        state,
        _gate(mixer, parts.get("a"), projected[-1]),
        scale=float(mixer.head_width) ** -0.5,
        key_heads=q.shape[1] // mixer.head_width,
        value_heads=1 if merged else value_heads,
        share=mixer.subheads,
        **options,
    )
    o_norm = mixer.o_norm
    total = _sum(mixer, value_heads, merged)
    y = gated_norm(o, value_heads, total, o_norm.weight, o_norm.eps, q.dtype, parts.get("g"))
    stream.add_product(y, mixer.o_proj.weight)


def _expanded(mixer: LinearAttentionMixer, name: str, y: Tensor, x: Tensor | None) -> Tensor:
    """q or k ``[B, channels]`` in its subheads; x ``[B, 1, d]`` for an expansion that reads it."""
    expand = getattr(mixer, f"{name}_expand")
    if expand is None:
        return y
    wide: Tensor = expand(y[:, None].unflatten(-1, (mixer.key_heads, -1)), x).flatten(1)
    return wide


def _convolved(mixer: LinearAttentionMixer, parts: list[Tensor], buffers: Buffers) -> list[Tensor]:
    """q, k, v ``[B, channels]`` through their short convolutions."""
    from longrecall.ops.decoding.triton.elementwise import convolve

    if mixer.q_conv is None or mixer.k_conv is None or mixer.v_conv is None:
        return parts
    taps = [c.weight for c in (mixer.q_conv, mixer.k_conv, mixer.v_conv)]
    states = [buffers[f"{name}_conv"].transpose(1, 2) for name in ("q", "k", "v")]
    return convolve([(y, state, weight, None) for y, state, weight in zip(parts, states, taps, strict=True)])


def _rotated(mixer: RetNet, y: Tensor, position: Tensor) -> Tensor:
    heads = y[:, None].unflatten(-1, (-1, mixer.head_width))
    return apply_rotary(heads, position[:, None], mixer.config.rope_theta).flatten(1)


def _gate(mixer: LinearAttentionMixer, raw: Tensor | None, low_rank: Tensor) -> Any:
    """The decay of a mixer: `raw` is its a_proj, `low_rank` the first half of GLA's projection."""
    from longrecall.ops.decoding.triton.recurrence import Gate

    if isinstance(mixer, GatedDeltaNet):
        return Gate("delta", raw, mixer.dt_bias, mixer.A_log)
    if isinstance(mixer, GLA):
        return Gate("channel", mixer.gk_proj[1](low_rank), divisor=mixer.config.gate_divisor)
    if isinstance(mixer, RetNet):
        heads = torch.arange(mixer.config.num_heads, device=low_rank.device, dtype=torch.float64)
        return Gate("fixed", torch.log1p(-(2.0 ** (-5.0 - heads))).float())
    return Gate(None)


def _sum(mixer: LinearAttentionMixer, value_heads: int, merged: bool) -> Any:
    """How the heads of the state add up to value heads."""
    from longrecall.ops.decoding.triton.elementwise import Sum

    width, heads, subheads = mixer.value_width, mixer.key_heads, mixer.subheads
    if merged:
        mixing = mixer.get_parameter("mixing")
        return Sum(heads, term_step=heads * width, column_step=width, weights=mixing.contiguous())
    if subheads == 1:
        return Sum(column_step=width)
    repeats = value_heads // heads
    weights = None
    if mixer.subhead_scale is not None:
        weights = torch.cat([torch.ones_like(mixer.subhead_scale[:, :1]), mixer.subhead_scale], dim=1).T.contiguous()
    return Sum(subheads, subheads * repeats * width, width, repeats, repeats * width, 0, weights)


def _mamba2(mixer: Mamba2, stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor) -> None:
    from longrecall.ops.decoding.triton.elementwise import Sum as Parts
    from longrecall.ops.decoding.triton.elementwise import convolve, gated_norm
    from longrecall.ops.decoding.triton.recurrence import Gate, recurrence

    config, conv = mixer.config, mixer.conv
    (projected,) = stream.project(norm, [mixer.in_proj.weight])
    z, channels, raw_step = projected.split(mixer.sizes, dim=-1)
    (mixed,) = convolve([(channels, buffers["conv"].transpose(1, 2), conv.weight, conv.bias)])
    keys = config.groups * config.state_dim
    values, b, c = mixed.split((config.inner_dim, keys, keys), dim=-1)
    low, high = config.time_step_limit
    o = recurrence(
        c,
        b,
        values,
        buffers["recurrent"],
        Gate("step", raw_step, mixer.dt_bias, mixer.A_log, low=low, high=float("inf") if high is None else high),
        scale=1.0,
        key_heads=config.groups,
        value_heads=config.num_heads,
        skip=mixer.D,
    )
    total = Parts(column_step=config.inner_dim // config.groups)
    inner = mixer.norm
    y = gated_norm(o, config.groups, total, inner.weight, inner.eps, mixed.dtype, z, gate_first=True)
    stream.add_product(y, mixer.out_proj.weight)
