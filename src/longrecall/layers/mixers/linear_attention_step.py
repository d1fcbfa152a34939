"""The decoding step of GLA, RetNet, DeltaNet and Gated DeltaNet in fused kernels, expanded and merged layers included.

A family says what is its own: which decay it has, and what happens to queries, keys and values after the convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer
from longrecall.layers.norm import Norm
from longrecall.layers.stepping.step import Buffers, MixerStep, PlainStep, Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops.backends import Choice
from longrecall.ops.decoding.op import step_choice


class LinearAttentionStep(MixerStep):
    """One token through projections, convolutions, recurrence, output norm and gate, in a few launches."""

    mixer: LinearAttentionMixer

    def decay(self, stream: Stream, projected: dict[str, Tensor]) -> Any:
        """The `Gate` (ops/decoding/triton/recurrence.py) by which the state fades."""
        from longrecall.ops.decoding.triton.recurrence import Gate

        return Gate(None)

    def more_weights(self) -> dict[str, Tensor]:
        """Weights whose products with the normed stream this family needs besides q, k, v, g, b and a, by name."""
        return {}

    def prepared(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v ``[B, channels]`` as the recurrence takes them."""
        return q, k, v

    def delta_options(self, projected: dict[str, Tensor]) -> dict[str, Any]:
        """Arguments of the recurrence for the delta rule; none for plain linear attention."""
        return {}

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        from longrecall.ops.decoding.triton.elementwise import gated_norm
        from longrecall.ops.decoding.triton.recurrence import recurrence

        mixer, state = self.mixer, buffers["recurrent"]
        maybe = {name: getattr(mixer, f"{name}_proj", None) for name in ("q", "k", "v", "g", "b", "a")}
        weights = {name: proj.weight for name, proj in maybe.items() if proj is not None} | self.more_weights()
        projected = dict(zip(weights, stream.project(norm, list(weights.values())), strict=True))
        x = stream.normed(norm)[:, None] if getattr(mixer.q_expand, "reads_input", False) else None
        q, k, v = self._convolved([self._expanded(name, projected[name], x) for name in ("q", "k", "v")], buffers)
        q, k, v = self.prepared(q, k, v, position)
        merged = state.shape[-1] != mixer.value_width
        value_heads = v.shape[1] // mixer.value_width
        o = recurrence(
            q,
            k,
            v,
            state,
            self.decay(stream, projected),
            scale=float(mixer.head_width) ** -0.5,
            key_heads=q.shape[1] // mixer.head_width,
            value_heads=1 if merged else value_heads,
            share=mixer.subheads,
            **self.delta_options(projected),
        )
        o_norm, total = mixer.o_norm, self._sum(value_heads, merged)
        y = gated_norm(o, value_heads, total, o_norm.weight, o_norm.eps, q.dtype, projected.get("g"))
        stream.add_product(y, mixer.o_proj.weight)

    def choices(self, buffers: Buffers) -> Sequence[Choice]:
        return [step_choice(buffers["recurrent"])]

    def _expanded(self, name: str, y: Tensor, x: Tensor | None) -> Tensor:
        """q or k ``[B, channels]`` in its subheads; x ``[B, 1, d]`` for an expansion that reads it."""
        expand = getattr(self.mixer, f"{name}_expand")
        if expand is None:
            return y
        wide: Tensor = expand(y[:, None].unflatten(-1, (self.mixer.key_heads, -1)), x).flatten(1)
        return wide

    def _convolved(self, parts: list[Tensor], buffers: Buffers) -> list[Tensor]:
        """q, k, v ``[B, channels]`` through their short convolutions."""
        from longrecall.ops.decoding.triton.elementwise import convolve

        mixer = self.mixer
        if mixer.q_conv is None or mixer.k_conv is None or mixer.v_conv is None:
            return parts
        taps = [c.weight for c in (mixer.q_conv, mixer.k_conv, mixer.v_conv)]
        states = [buffers[f"{name}_conv"].transpose(1, 2) for name in ("q", "k", "v")]
        return convolve([(y, state, weight, None) for y, state, weight in zip(parts, states, taps, strict=True)])

    def _sum(self, value_heads: int, merged: bool) -> Any:
        """How the heads of the state add up to value heads."""
        from longrecall.ops.decoding.triton.elementwise import Sum

        mixer = self.mixer
        width, heads, subheads = mixer.value_width, mixer.key_heads, mixer.subheads
        if merged:
            mixing = mixer.get_parameter("mixing")
            return Sum(heads, term_step=heads * width, column_step=width, weights=mixing.contiguous())
        if subheads == 1:
            return Sum(column_step=width)
        repeats = value_heads // heads
        weights = None
        if mixer.subhead_scale is not None:
            ones = torch.ones_like(mixer.subhead_scale[:, :1])
            weights = torch.cat([ones, mixer.subhead_scale], dim=1).T.contiguous()
        return Sum(subheads, subheads * repeats * width, width, repeats, repeats * width, 0, weights)


class StepKind(Protocol):
    """What makes the step of a family: its class."""

    def __call__(self, config: MixerConfig, mixer: Any, settings: StepSettings) -> Step: ...


def linear_attention_step(kind: StepKind, config: MixerConfig, mixer: Any, settings: StepSettings) -> Step:
    """A step of this kind where the kernels serve the mixer, its forward pass on one token elsewhere."""
    serves = settings.serves_state(mixer.head_width)
    return kind(config, mixer, settings) if serves else PlainStep(config, mixer, settings)
