"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): the gated delta rule with a decay for every key channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.kda import KDAConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.delta_net import reset_time_steps
from longrecall.layers.mixers.linear_attention import LinearAttentionMixer, mask_tokens
from longrecall.layers.norm import l2_normalise, operand_dtype
from longrecall.layers.projections import project, project_gated
from longrecall.ops import gated_delta_rule


class KDA(LinearAttentionMixer):
    """q and k through convolution, SiLU and L2 norm; beta = sigmoid(W x); scale K ** -0.5.

    log decay = -exp(A_log) * softplus(f), f a low-rank projection of x + dt_bias, with one A_log per head. With a floor
    it is floor * sigmoid(exp(A_log) * f). The normed output is multiplied by the sigmoid of another such projection.
    """

    def __init__(self, config: KDAConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, config.norm_eps)
        self.config = config
        rank, keys, values = config.inner_rank, config.key_channels, config.num_heads * config.value_dim
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, keys, bias=False))
        self.b_proj = nn.Linear(hidden_size, config.state_heads, bias=False)
        gate = nn.Linear(rank, values, bias=config.gate_bias)
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), gate)
        self.A_log = nn.Parameter(torch.empty(config.state_heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in (1, 16), or 1 with a floor; time steps log-uniform in 0.001..0.1, as in the published models."""
        with torch.no_grad():
            if self.config.decay_floor is None:
                self.A_log.uniform_(1.0, 16.0).log_()
            else:
                self.A_log.zero_()
        reset_time_steps(self.dt_bias)

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        """The products of x ``[B, T, d]`` of full rank: q, k, v and b (beta)."""
        return project(x, {name: self.get_submodule(f"{name}_proj") for name in "qkvb"}, joined=1)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, K, V]``)."""
        config = self.config
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        projected = self.projections(x)
        q, k, v, new_state = self.heads(projected, x, state, mask)
        if not config.conv_width:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        beta = projected["b"].to(wide).sigmoid() * (2.0 if config.negative_eigenvalues else 1.0)
        o, final = gated_delta_rule(
            l2_normalise(q.to(wide)),
            l2_normalise(k.to(wide)),
            self.share_values(v),
            mask_tokens(self.log_decay(x), mask),
            mask_tokens(beta, mask),
            initial_state=None if state is None else state["recurrent"],
        )
        o, gate = self.sum_subheads(o), self.get_submodule("g_proj")(x)
        out = project_gated(o, self.o_norm, gate, self.o_proj, operand_dtype(x), "sigmoid")
        return out, {"recurrent": final, **new_state}

    def log_decay(self, x: Tensor) -> Tensor:
        """x ``[B, T, d]`` -> log decay of every key channel of the state ``[B, T, H, K]``, float32 or wider."""
        raw = self.f_proj(x)
        raw = raw if raw.dtype == torch.float64 else raw.float()
        raw = (raw + self.dt_bias.to(raw.dtype)).unflatten(-1, (self.config.state_heads, -1))
        rate = self.A_log.to(raw.dtype).exp()[:, None]
        floor = self.config.decay_floor
        decay: Tensor = -rate * F.softplus(raw) if floor is None else floor * torch.sigmoid(rate * raw)
        return decay
