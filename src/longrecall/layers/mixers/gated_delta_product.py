"""Gated DeltaProduct (Siems et al. 2025, arXiv 2502.10297): several steps of the delta rule for every token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.gated_delta_product import GatedDeltaProductConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.delta_net import reset_time_steps
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import RMSNorm, l2_normalise, operand_dtype
from longrecall.layers.projections import project_gated
from longrecall.ops import gated_delta_rule


class GatedDeltaProduct(nn.Module):
    r"""The state of a token is that of the token before after a decay and n steps of the delta rule.

    .. math:: S_t = \Big(\prod_{j=n}^{1} (I - \beta_{t,j} k_{t,j} k_{t,j}^\top)\Big) e^{g_t} S_{t-1} + \dots, \qquad
              o_t = K^{-1/2} q_t S_t

    It runs as the delta rule over a sequence n times as long, of which every n-th output is read. Rows of the
    projections of k, v and beta are those of the first step, then those of the second.
    """

    def __init__(self, config: GatedDeltaProductConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        heads, values = config.value_head_count, config.value_head_count * config.value_dim
        for name, size in config.channels().items():
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, size, bias=False))
            self.add_module(f"{name}_conv", ShortConvolution(size, config.conv_width) if config.conv_width else None)
        self.b_proj = nn.Linear(hidden_size, config.steps * heads, bias=False)
        self.a_proj = nn.Linear(hidden_size, heads, bias=False) if config.decay else None
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if config.output_gate else None
        self.o_norm = RMSNorm(config.value_dim, config.norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads)) if config.decay else None
        self.dt_bias = nn.Parameter(torch.empty(heads)) if config.decay else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in (0, 16), time steps log-uniform in 0.001..0.1, as in Gated DeltaNet."""
        if self.A_log is None or self.dt_bias is None:
            return
        nn.init.uniform_(self.A_log, 1e-4, 16.0)
        reset_time_steps(self.dt_bias)
        with torch.no_grad():
            self.A_log.log_()

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, Hv, K, V]``)."""
        config, results, new_state = self.config, {}, {}
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        for name in "qkv":
            y = self.get_submodule(f"{name}_proj")(x)
            if config.conv_width:
                key = f"{name}_conv"
                y, new_state[key] = self.get_submodule(key)(y, None if state is None else state[key], mask)
            else:
                y = F.silu(y)
            results[name] = y
        steps, keys = config.steps, (config.num_heads, config.key_dim)
        # Only the query after a token's last step is read.
        q = l2_normalise(results["q"].to(wide).unflatten(-1, keys))
        q = F.pad(q[:, :, None], (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2)
        k = l2_normalise(results["k"].to(wide).unflatten(-1, (steps, *keys))).flatten(1, 2)
        v = results["v"].unflatten(-1, (steps, config.value_head_count, config.value_dim)).flatten(1, 2)
        beta = self.b_proj(x).to(wide).sigmoid() * (2.0 if config.negative_eigenvalues else 1.0)
        o, final = gated_delta_rule(
            q,
            k,
            v,
            self._log_decay(x, mask),
            mask_tokens(beta, mask).unflatten(-1, (steps, -1)).flatten(1, 2),
            initial_state=None if state is None else state["recurrent"],
        )
        o, dtype = o[:, steps - 1 :: steps], operand_dtype(x)
        if self.g_proj is not None:
            projected = project_gated(o, self.o_norm, self.g_proj(x), self.o_proj, dtype)
        else:
            projected = self.o_proj(self.o_norm(o, dtype).flatten(-2))
        return projected, {"recurrent": final, **new_state}

    def _log_decay(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Log decay of every step ``[B, T * n, Hv]``: 0 but for the first step of a token; None = no decay at all."""
        if self.a_proj is None or self.A_log is None or self.dt_bias is None:
            return None
        raw = self.a_proj(x)
        raw = raw if raw.dtype == torch.float64 else raw.float()
        decay = -self.A_log.to(raw.dtype).exp() * F.softplus(raw + self.dt_bias.to(raw.dtype))
        return F.pad(mask_tokens(decay, mask)[:, :, None], (0, 0, 0, self.config.steps - 1)).flatten(1, 2)
