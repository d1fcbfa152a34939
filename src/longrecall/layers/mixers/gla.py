"""Gated linear attention (Yang et al. 2024), with the merged heads of StateX as an option."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.gla import GLAConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer, mask_tokens
from longrecall.layers.mixers.linear_attention_step import LinearAttentionStep, linear_attention_step
from longrecall.layers.stepping.step import Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops import gated_linear_attention, merged_linear_attention


class GLA(LinearAttentionMixer):
    """log decay = logsigmoid(low-rank projection of x) / 16 per key channel; scale K ** -0.5."""

    def __init__(self, config: GLAConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, config.norm_eps)
        self.config = config
        keys = config.key_channels
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, config.gate_rank, bias=False), nn.Linear(config.gate_rank, keys, bias=True)
        )
        if config.merged:
            self.mixing = nn.Parameter(torch.eye(config.num_heads))

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state."""
        projected = self.projections(x)
        q, k, v, new_state = self.heads(projected, x, state, mask)
        gate = self.gk_proj(x).unflatten(-1, (-1, self.head_width))
        gate = gate if gate.dtype == torch.float64 else gate.float()
        log_decay = mask_tokens(F.logsigmoid(gate) / self.config.gate_divisor, mask)
        k = mask_tokens(k, mask)
        initial = None if state is None else state["recurrent"]
        if self.config.merged:
            o, final = merged_linear_attention(q, k, v, log_decay, self.mixing, initial_state=initial)
        else:
            o, final = gated_linear_attention(q, k, self.share_values(v), log_decay, initial_state=initial)
        return self.output(o, projected, x.dtype), {"recurrent": final, **new_state}

    def decoding_step(self, config: GLAConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return linear_attention_step(GLAStep, config, self, settings)


class GLAStep(LinearAttentionStep):
    """A decay for every key channel, from the low-rank projection."""

    mixer: GLA

    def more_weights(self) -> dict[str, Tensor]:
        return {"gk": self.mixer.gk_proj.get_parameter("0.weight")}

    def decay(self, stream: Stream, projected: dict[str, Tensor]) -> Any:
        from longrecall.ops.decoding.triton.recurrence import Gate

        mixer = self.mixer
        raw = stream.through(projected["gk"], mixer.gk_proj[1])
        return Gate("channel", raw, divisor=mixer.config.gate_divisor)
