"""HGRN2 (Qin et al. 2024, "Gated Linear RNNs with State Expansion"): the forget gate decides what is written."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.errors import UserError
from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.hgrn2 import BOUNDS, HGRN2Config
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import RMSNorm, operand_dtype
from longrecall.ops import gated_linear_attention


class HGRN2(nn.Module):
    r"""Gated linear attention whose keys are what the forget gate gives up.

    .. math:: f = b + (1 - b)\,\sigma(W_f x), \qquad S_t = \mathrm{diag}(f_t) S_{t-1} + (1 - f_t)^\top W_i x_t

    with the lower bound b; queries are SiLU(W_q x), scale K ** -0.5, and one norm runs over all heads together.
    """

    def __init__(self, config: HGRN2Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        keys, values = config.num_heads * config.key_dim, config.num_heads * config.value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.f_proj = nn.Linear(hidden_size, keys, bias=False)
        self.i_proj = nn.Linear(hidden_size, values, bias=False)
        for name, size in (("q", keys), ("f", keys), ("i", values)):
            width, activation = config.conv_width, config.conv_activation
            made = ShortConvolution(size, width, activation=activation) if width else None
            self.add_module(f"{name}_conv", made)
        # Zeros: all layers together share out the range from 0 to 1 evenly.
        self.bounds = None if config.bound_rows is None else nn.Parameter(torch.zeros(config.bound_rows, keys))
        self.o_norm = RMSNorm(values, config.norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        lower_bounds: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, K, V]``).

        `lower_bounds` ``[rows, H * K]`` of all layers, which a layer with a row of them needs. A layer that holds them
        has them in its state as ``carried.lower_bounds``.
        """
        config, heads, results, new_state = self.config, self.config.num_heads, [], {}
        if self.bounds is not None:
            lower_bounds = new_state[f"carried.{BOUNDS}"] = cumulative_bounds(self.bounds)
        bound = self._bound(lower_bounds, torch.float64 if x.dtype == torch.float64 else torch.float32)
        for name in ("q", "f", "i"):
            y = getattr(self, f"{name}_proj")(x)
            if (convolution := getattr(self, f"{name}_conv")) is not None:
                key = f"{name}_conv"
                y, new_state[key] = convolution(y, None if state is None else state[key], mask)
            results.append(y.unflatten(-1, (heads, -1)))
        q, forget, v = results
        log_forget, k = forget_gate(forget if x.dtype == torch.float64 else forget.float(), bound)
        o, final = gated_linear_attention(
            q if config.conv_width and config.conv_activation else F.silu(q),
            mask_tokens(k, mask),
            v,
            mask_tokens(log_forget, mask),
            initial_state=None if state is None else state["recurrent"],
        )
        y = self.o_proj(self.o_norm(o.flatten(-2), operand_dtype(x)))
        return y, {"recurrent": final, **new_state}

    def _bound(self, table: Tensor | None, dtype: torch.dtype) -> Tensor | float:
        """The lower bound of the forget gate: one number, or ``[H, K]``."""
        row = self.config.bound_row
        if row is None:
            return self.config.lower_bound
        if table is None or row >= len(table):
            raise UserError(
                f'mixer "hgrn2" reads row {row} of lower bounds, but no layer before it holds a table that long. '
                f'The first hgrn2 layer needs "bound_rows": {row + 1} or more'
            )
        bound: Tensor = table[row].to(dtype).unflatten(-1, (self.config.num_heads, -1))
        return bound


def cumulative_bounds(table: Tensor) -> Tensor:
    """The lower bounds of every layer, growing from 0 in the first: ``[rows, channels]`` -> the same, in float32."""
    wide = table if table.dtype == torch.float64 else table.float()
    shares = wide.softmax(0)
    return shares.cumsum(0) - shares[0]


def forget_gate(raw: Tensor, lower_bound: float | Tensor) -> tuple[Tensor, Tensor]:
    """log f and 1 - f of f = b + (1 - b) sigmoid(raw); both exact to the last digits where f is near 0 or 1.

    `raw` ``[..., H, K]``; b is a number or ``[H, K]``.
    """
    if isinstance(lower_bound, Tensor):
        log_forget = torch.logaddexp(lower_bound.log(), F.logsigmoid(raw) + torch.log1p(-lower_bound))
    elif lower_bound == 0.0:
        log_forget = F.logsigmoid(raw)
    else:
        # Filled on the device: a copy from the host would stop a CUDA graph.
        bound = torch.full((), math.log(lower_bound), dtype=raw.dtype, device=raw.device)
        log_forget = torch.logaddexp(bound, F.logsigmoid(raw) + math.log1p(-lower_bound))
    return log_forget, torch.sigmoid(-raw) * (1.0 - lower_bound)
