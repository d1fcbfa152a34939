"""RetNet's multi-scale retention (Sun et al. 2023): linear attention with rotary keys and one fixed decay per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longrecall.layers.descriptions.retnet import RetNetConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer, mask_tokens
from longrecall.layers.mixers.linear_attention_step import LinearAttentionStep, linear_attention_step
from longrecall.layers.rotary import apply_rotary, token_positions
from longrecall.layers.stepping.step import Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops import gated_linear_attention, merged_linear_attention


class RetNet(LinearAttentionMixer):
    """Head h decays by 1 - 2 ** (-5 - h) a token (Sun et al. 2023, equation 8); scale K ** -0.5."""

    def __init__(self, config: RetNetConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, config.norm_eps)
        self.config = config
        if config.merged:
            self.mixing = nn.Parameter(torch.eye(config.num_heads))

    def log_decays(self, device: torch.device) -> Tensor:
        """The log decay of every head ``[H]``, float64."""
        heads = torch.arange(self.config.num_heads, device=device, dtype=torch.float64)
        return torch.log1p(-(2.0 ** (-5.0 - heads)))

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state; `position` ``[B]`` counts the tokens read before x."""
        projected = self.projections(x)
        q, k, v, new_state = self.heads(projected, x, state, mask)
        positions = token_positions(position, x.shape[1], mask)
        q, k = (apply_rotary(y, positions, self.config.rope_theta) for y in (q, k))
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        log_decay = self.log_decays(x.device).to(wide).expand(*x.shape[:2], -1)
        k, log_decay = mask_tokens(k, mask), mask_tokens(log_decay, mask)
        initial = None if state is None else state["recurrent"]
        if self.config.merged:
            o, final = merged_linear_attention(q, k, v, log_decay, self.mixing, initial_state=initial)
        else:
            o, final = gated_linear_attention(q, k, v, log_decay, initial_state=initial)
        return self.output(o, projected, x.dtype), {"recurrent": final, **new_state}

    def decoding_step(self, config: RetNetConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return linear_attention_step(RetNetStep, config, self, settings)


class RetNetStep(LinearAttentionStep):
    """Rotated queries and keys, and the fixed decays."""

    mixer: RetNet

    def prepared(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._rotated(q, position), self._rotated(k, position), v

    def _rotated(self, y: Tensor, position: Tensor) -> Tensor:
        heads = y[:, None].unflatten(-1, (-1, self.mixer.head_width))
        return apply_rotary(heads, position[:, None], self.mixer.config.rope_theta).flatten(1)

    def decay(self, stream: Stream, projected: dict[str, Tensor]) -> Any:
        from longrecall.ops.decoding.triton.recurrence import Gate

        return Gate("fixed", self.mixer.log_decays(projected["q"].device).float())
