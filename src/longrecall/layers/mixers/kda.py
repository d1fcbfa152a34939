"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): the gated delta rule with a decay for every key channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.kda import KDAConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.delta_net import reset_time_steps
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import RMSNorm, l2_normalise, operand_dtype
from longrecall.layers.projections import project_gated
from longrecall.ops import gated_delta_rule
from longrecall.ops.shapes import repeat_heads


class KDA(nn.Module):
    """q and k through convolution, SiLU and L2 norm; beta = sigmoid(W x); scale K ** -0.5.

    log decay = -exp(A_log) * softplus(low-rank projection of x + dt_bias), with one A_log per value head, or with a
    lowest decay, lowest_decay * sigmoid(exp(A_log) * (the same)); the normed output is multiplied by the sigmoid of
    another low-rank projection.
    """

    def __init__(self, config: KDAConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        heads, rank = config.value_head_count, int(config.gate_rank or config.value_dim)
        keys, values = config.num_heads * config.key_dim, heads * config.value_dim
        gates = heads * config.key_dim
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, size, bias=False))
            self.add_module(f"{name}_conv", ShortConvolution(size, config.conv_width) if config.conv_width else None)
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, gates, bias=False))
        self.b_proj = nn.Linear(hidden_size, heads, bias=False)
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, values, bias=True))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(gates))
        self.o_norm = RMSNorm(config.value_dim, config.norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in (1, 16), time steps log-uniform in 0.001..0.1, as in the published model."""
        nn.init.uniform_(self.A_log, 1.0, 16.0)
        with torch.no_grad():
            self.A_log.log_()
        reset_time_steps(self.dt_bias)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, K, V]``)."""
        config, results, new_state = self.config, [], {}
        for name in ("q", "k", "v"):
            y = getattr(self, f"{name}_proj")(x)
            convolution = getattr(self, f"{name}_conv")
            if convolution is None:
                y = F.silu(y)
            else:
                key = f"{name}_conv"
                y, new_state[key] = convolution(y, None if state is None else state[key], mask)
            results.append(y.unflatten(-1, (-1, config.value_dim if name == "v" else config.key_dim)))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        beta = self.b_proj(x).to(wide).sigmoid() * (2.0 if config.negative_eigenvalues else 1.0)
        # Decays differ between the value heads that share a key.
        q, k = (repeat_heads(l2_normalise(y.to(wide)), config.value_head_count) for y in results[:2])
        o, final = gated_delta_rule(
            q,
            k,
            results[2],
            mask_tokens(self.log_decay(x), mask),
            mask_tokens(beta, mask),
            initial_state=None if state is None else state["recurrent"],
        )
        projected = project_gated(o, self.o_norm, self.g_proj(x), self.o_proj, operand_dtype(x), "sigmoid")
        return projected, {"recurrent": final, **new_state}

    def log_decay(self, x: Tensor) -> Tensor:
        """x ``[B, T, d]`` -> log decay of every key channel ``[B, T, Hv, K]``, float32 or wider."""
        raw = self.f_proj(x)
        raw = raw if raw.dtype == torch.float64 else raw.float()
        raw = (raw + self.dt_bias.to(raw.dtype)).unflatten(-1, (self.config.value_head_count, -1))
        rate, lowest = self.A_log.to(raw.dtype).exp()[:, None], self.config.lowest_decay
        decay: Tensor = -rate * F.softplus(raw) if lowest is None else lowest * torch.sigmoid(rate * raw)
        return decay
