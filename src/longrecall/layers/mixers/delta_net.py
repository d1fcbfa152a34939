"""DeltaNet (Yang et al. 2024b) and Gated DeltaNet (Yang et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers import fused_delta
from longrecall.layers.descriptions.delta_net import DeltaNetConfig, GatedDeltaNetConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer, mask_tokens
from longrecall.layers.mixers.linear_attention_step import LinearAttentionStep, linear_attention_step
from longrecall.layers.norm import l2_normalise
from longrecall.layers.stepping.step import Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops import gated_delta_rule
from longrecall.ops.delta_rule.gates import delta_gates


class DeltaNet(LinearAttentionMixer):
    """q and k through convolution, SiLU and L2 norm; beta = sigmoid(W x); no decay; scale K ** -0.5."""

    def __init__(self, config: DeltaNetConfig | GatedDeltaNetConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, config.norm_eps)
        self.config = config
        self.b_proj = nn.Linear(hidden_size, config.state_heads, bias=False)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        projected = self.projections(x)
        decay, beta = self.gates(projected)
        decay, beta = None if decay is None else mask_tokens(decay, mask), mask_tokens(beta, mask)
        if fused_delta.why_not(self, x, mask, decay) is None:
            o, new_state = fused_delta.read_and_write(self, projected, x, state, decay, beta, mask)
            return self.gated_output(o, projected, x.dtype), new_state
        q, k, v, new_state = self.heads(projected, x, state, mask)
        if not self.config.conv_width:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = l2_normalise(q.to(wide)), l2_normalise(k.to(wide))
        o, final = gated_delta_rule(
            q,
            k,
            self.share_values(v),
            decay,
            beta,
            initial_state=None if state is None else state["recurrent"],
        )
        return self.output(o, projected, x.dtype), {"recurrent": final, **new_state}

    @property
    def largest_beta(self) -> float:
        """2 lets an eigenvalue of a token's update be negative."""
        return 2.0 if self.config.negative_eigenvalues else 1.0

    def gates(self, projected: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        """Log decay, None here as DeltaNet never forgets by decay, and beta ``[B, T, H]``, float32 or wider."""
        raw = projected["b"]
        return None, (raw if raw.dtype == torch.float64 else raw.float()).sigmoid() * self.largest_beta

    def decoding_step(self, config: DeltaNetConfig | GatedDeltaNetConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return linear_attention_step(DeltaNetStep, config, self, settings)


class GatedDeltaNet(DeltaNet):
    """DeltaNet with the decay of Mamba-2: log decay = -exp(A_log) * softplus(W x + dt_bias)."""

    def __init__(self, config: GatedDeltaNetConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        heads = config.state_heads
        self.a_proj = nn.Linear(hidden_size, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in (0, 16), time steps log-uniform in 0.001..0.1, as in the published models."""
        nn.init.uniform_(self.A_log, 1e-4, 16.0)
        reset_time_steps(self.dt_bias)
        with torch.no_grad():
            self.A_log.log_()

    def gates(self, projected: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        return delta_gates(projected["a"], projected["b"], self.A_log, self.dt_bias, self.largest_beta)

    def decoding_step(self, config: DeltaNetConfig | GatedDeltaNetConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return linear_attention_step(GatedDeltaNetStep, config, self, settings)


class DeltaNetStep(LinearAttentionStep):
    """The delta rule's beta, and keys that the recurrence normalises."""

    mixer: DeltaNet

    def prepared(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # A short convolution ends with its SiLU.
        return (q, k, v) if self.mixer.config.conv_width else (F.silu(q), F.silu(k), F.silu(v))

    def delta_options(self, projected: dict[str, Tensor]) -> dict[str, Any]:
        return {"beta": projected["b"], "normalise": True, "beta_factor": self.mixer.largest_beta}


class GatedDeltaNetStep(DeltaNetStep):
    """The same with the decay of Mamba-2."""

    mixer: GatedDeltaNet

    def decay(self, stream: Stream, projected: dict[str, Tensor]) -> Any:
        from longrecall.ops.decoding.triton.recurrence import Gate

        return Gate("delta", projected["a"], self.mixer.dt_bias, self.mixer.A_log)


def reset_time_steps(bias: Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> None:
    """Fill `bias` so that softplus(bias) is log-uniform in [low, high] (Gu and Dao 2023, section 3.6)."""
    with torch.no_grad():
        step = torch.empty_like(bias).uniform_().mul_(torch.tensor(high / low).log()).exp_().mul_(low).clamp_(min=floor)
        bias.copy_(step + torch.log(-torch.expm1(-step)))
