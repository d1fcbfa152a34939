"""Attention to the keys and values of an earlier layer (Hymba's key-value sharing between layers)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longrecall.errors import UserError
from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.mixers.attention import Attention
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.rotary import token_positions, turned, turns
from longrecall.layers.stepping.step import PlainStep, Step, StepSettings


class TakingAttention(Attention):
    """It projects queries alone, and keeps no state: keys come with the cache and the window of who gives them.

    Source: "Hymba: A Hybrid-head Architecture for Small Language Models", section 2.2 (cross-layer KV sharing).
    """

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        del self.k_proj, self.v_proj, self.k_norm

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        **shared: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and an empty state; `shared`: what an earlier layer gave.

        Raises:
            UserError: none has given anything.
        """
        cache: dict[str, Any] = {name.removeprefix("shared_"): tensor for name, tensor in shared.items()}
        if any(tensor is None for tensor in cache.values()):
            raise UserError(
                'mixer "attention" takes keys and values of an earlier layer, but no layer before it gives any '
                '("shared_keys": "give")'
            )
        q, gate = self.cut_queries(self.q_proj(x))
        positions = token_positions(position, x.shape[1], mask)
        if self.rotation is not None:
            q = turned(q, turns(self.rotation, positions, q.dtype))
        begins = bool(self.config.memory_tokens) and state is None
        found = self.read_memory(q, cache) if begins else self.read(q, cache, positions)
        return self.output(found, gate), {}

    def decoding_step(self, config: AttentionConfig, settings: StepSettings) -> Step:
        """The step that decodes one token: the forward pass, since there is nothing to keep."""
        return PlainStep(config, self, settings)
