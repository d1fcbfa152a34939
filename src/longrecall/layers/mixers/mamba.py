"""Mamba (Gu and Dao 2023): a selective state space in which every channel is a head of one value."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.mamba import MambaConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.delta_net import reset_time_steps
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import RMSNorm, rms_normalise
from longrecall.layers.projections import is_biased
from longrecall.ops import selective_scan


class Mamba(nn.Module):
    """One projection to x and z, convolution on x; time steps, B and C from the convolved x; decay exp(-dt exp(A_log)).

    The output is (C S + D x) * silu(z), projected.
    """

    def __init__(self, config: MambaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        inner, keys = config.inner_dim, config.state_dim
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=config.proj_bias)
        self.conv = ShortConvolution(inner, config.conv_width, config.conv_bias, config.conv_activation)
        self.x_proj = nn.Linear(inner, config.dt_rank + 2 * keys, bias=False)
        if config.input_norms == "weighted":
            for name, size in (("dt", config.dt_rank), ("b", keys), ("c", keys)):
                self.add_module(f"{name}_norm", RMSNorm(size, config.norm_eps))
        self.dt_proj = nn.Linear(config.dt_rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, keys))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=config.proj_bias) if config.out_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A = 1..N in every channel, time steps log-uniform in 0.001..0.1, D one (Gu and Dao 2023, section 3.6)."""
        config = self.config
        with torch.no_grad():
            keys = torch.arange(1, config.state_dim + 1, dtype=torch.float32, device=self.A_log.device)
            self.A_log.copy_(keys.log().expand_as(self.A_log))
        nn.init.uniform_(self.dt_proj.weight, -(config.dt_rank**-0.5), config.dt_rank**-0.5)
        reset_time_steps(self.dt_proj.bias)
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, 1, N, I]``)."""
        config = self.config
        channels, z = self.in_proj(x).chunk(2, dim=-1)
        channels, conv_state = self.conv(channels, None if state is None else state["conv"], mask)
        low_rank, b, c = self.x_proj(channels).split((config.dt_rank, config.state_dim, config.state_dim), dim=-1)
        low_rank, b, c = (self._normed(name, part) for name, part in (("dt", low_rank), ("b", b), ("c", c)))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        step = mask_tokens(F.softplus(self._raw_step(low_rank, wide)), mask)
        y, final = selective_scan(
            channels.to(wide),
            step,
            -self.A_log.to(wide).exp(),
            b,
            c,
            self.D,
            initial_state=None if state is None else state["recurrent"].squeeze(1),
        )
        y = (y * F.silu(z.to(wide))).to(x.dtype)
        projected: Tensor = y if self.out_proj is None else self.out_proj(y)
        return projected, {"recurrent": final.unsqueeze(1), "conv": conv_state}

    def _normed(self, name: str, part: Tensor) -> Tensor:
        """The low-rank time step, B or C ``[B, T, n]`` after its norm, if there is one."""
        kind = self.config.input_norms
        if kind == "none":
            return part
        if kind == "plain":
            return rms_normalise(part, self.config.norm_eps)
        normed: Tensor = self.get_submodule(f"{name}_norm")(part)
        return normed

    def _raw_step(self, low_rank: Tensor, wide: torch.dtype) -> Tensor:
        """Time steps before their softplus ``[B, T, I]`` from their low-rank part ``[B, T, R]``, in `wide`."""
        if not is_biased(self.dt_proj):
            called: Tensor = self.dt_proj(low_rank)
            return called.to(wide)
        # The bias is added in float32: it holds time steps as small as 0.001.
        return F.linear(low_rank, self.dt_proj.weight).to(wide) + self.dt_proj.bias.to(wide)
