"""Time mixing of RWKV-7 (Peng et al. 2025, "Goose", arXiv 2503.14456): a delta rule with separate keys for removal."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.errors import UserError
from longrecall.layers.descriptions.rwkv7 import FIRST_VALUE, RWKV7Config
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.mixers.rwkv import token_shift
from longrecall.layers.norm import GroupNorm
from longrecall.ops import generalised_delta_rule

# Keeps the removal key of a token without one from dividing by zero (as in torch.nn.functional.normalize).
SMALLEST_NORM = 1e-12


class RWKV7(nn.Module):
    r"""Every input is x mixed with the token before; then, per head (the paper's section 4, with rows for columns),

    .. math:: S_t = (\mathrm{diag}(w_t) - (\hat\kappa_t \circ a_t)^\top \hat\kappa_t) S_{t-1} + \tilde k_t^\top v_t,
              \qquad o_t = r_t S_t

    with :math:`\log w = -e^{-1/2} \sigma(w_0 + \tanh(x A_w) B_w)`, the rate :math:`a = \sigma(a_0 + x A_a B_a)`, the
    removal key :math:`\hat\kappa` (the unit vector along :math:`k \circ \xi`), and the key that is written,
    :math:`\tilde k = k \circ (1 + (a - 1) \circ \alpha)`. After the norm of each head the current token is read once
    more, :math:`(r \cdot (\rho \circ \tilde k)) v`, and all is gated by :math:`\sigma(x A_g) B_g`.

    With the value residual, v is :math:`v + \sigma(v_0 + x A_v B_v) \circ (v^{first} - v)`, where the first layer gives
    :math:`v^{first}` to the later ones. RWKV's channel mixing is rwkv_channel.py.
    """

    def __init__(self, config: RWKV7Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        keys, values = config.num_heads * config.key_dim, config.num_heads * config.value_dim
        self.mix = nn.Parameter(torch.empty(6, hidden_size))
        self.r_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.decay = nn.Parameter(torch.empty(keys))
        self.decay_down = nn.Linear(hidden_size, config.decay_rank, bias=False)
        self.decay_up = nn.Linear(config.decay_rank, keys, bias=False)
        self.rate = nn.Parameter(torch.empty(keys))
        self.rate_down = nn.Linear(hidden_size, config.rate_rank, bias=False)
        self.rate_up = nn.Linear(config.rate_rank, keys, bias=False)
        if config.value_rank is not None:
            self.value_share = nn.Parameter(torch.empty(values))
            self.value_down = nn.Linear(hidden_size, config.value_rank, bias=False)
            self.value_up = nn.Linear(config.value_rank, values, bias=False)
        self.gate_down = nn.Linear(hidden_size, config.gate_rank, bias=False)
        self.gate_up = nn.Linear(config.gate_rank, values, bias=False)
        self.removal_scale = nn.Parameter(torch.empty(keys))
        self.rate_scale = nn.Parameter(torch.empty(keys))
        self.bonus = nn.Parameter(torch.empty(config.num_heads, config.key_dim))
        self.o_norm = GroupNorm(config.num_heads, values, eps=config.norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' constants for a layer halfway up, which needs no layer index.

        Decays of a step from exp(-0.0009) to exp(-0.11) over the channels, learning rates about one half, bonuses of
        0, values two thirds of which are those of the first layer (where they are mixed). The token before counts for
        1 in the first channel and less and less in the later ones. Rows of `mix`: r, decay, k, v, rate, gate.
        """
        channels = torch.arange(self.mix.shape[1], device=self.mix.device) / self.mix.shape[1]
        for row, power in zip(self.mix, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            # Half of the first layer's power: the authors' falls with depth from there to none.
            row.copy_(1 - channels ** (power / 2))
        keys = torch.linspace(0, 1, self.decay.numel(), device=self.decay.device)
        self.decay.copy_(-6.5 + 5 * keys ** (0.85 + 0.5**0.5))
        nn.init.zeros_(self.rate)
        nn.init.constant_(self.removal_scale, 0.85)
        nn.init.ones_(self.rate_scale)
        nn.init.zeros_(self.bonus)
        if self.config.value_rank is not None:
            nn.init.constant_(self.value_share, 0.73)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        first_value: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, K, V]``, ``shift [B, d, 1]``).

        `first_value` ``[B, T, H * V]``: the values of an earlier layer, which a layer with a value residual needs. A
        layer that gives its own has them in its state as ``carried.first_value``.
        """
        before, shift = token_shift(x, None if state is None else state["shift"], mask)
        change = before - x
        for_r, for_decay, for_k, for_v, for_rate, for_gate = (x + change * share for share in self.mix)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        values = self.v_proj(for_v)
        carried = {f"carried.{FIRST_VALUE}": values} if self.config.gives_values else {}
        if self.config.value_rank is not None:
            values = self._with_first(values, for_v, first_value)
        r, k, v = (self._heads(y) for y in (self.r_proj(for_r), self.k_proj(for_k), values))
        k, v = k.to(wide), v.to(wide)
        moved = self.decay_up(torch.tanh(self.decay_down(for_decay)))
        log_decay = self._heads(-math.exp(-0.5) * (self.decay.to(wide) + moved.to(wide)).sigmoid())
        rate = self._heads((self.rate.to(wide) + self.rate_up(self.rate_down(for_rate)).to(wide)).sigmoid())
        removal = F.normalize(k * self._heads(self.removal_scale.to(wide)), dim=-1, eps=SMALLEST_NORM)
        written = k * (1 + (rate - 1) * self._heads(self.rate_scale.to(wide)))
        o, final = generalised_delta_rule(
            r,
            mask_tokens(written, mask),
            v,
            mask_tokens(log_decay, mask),
            mask_tokens(removal, mask),
            removal * rate,
            scale=1.0,
            initial_state=None if state is None else state["recurrent"],
        )
        current = (r.to(wide) * self.bonus.to(wide) * written).sum(-1, keepdim=True) * v
        gate = self.gate_up(self.gate_down(for_gate).sigmoid())
        mixed = (self.o_norm(o) + current.flatten(-2)) * gate.to(wide)
        projected: Tensor = self.o_proj(mixed.to(x.dtype))
        return projected, {"recurrent": final, "shift": shift, **carried}

    def _with_first(self, values: Tensor, x: Tensor, first: Tensor | None) -> Tensor:
        """The layer's values ``[B, T, H * V]``, each mixed with that of the layer that gave its own."""
        if first is None:
            raise UserError(
                'mixer "rwkv7" with a value_rank needs the values of an earlier layer, but no layer before it gives '
                'any. Set "gives_values": true in one of them'
            )
        if first.shape != values.shape:
            raise UserError(
                f'mixer "rwkv7" has {values.shape[-1]} value channels, but the layer that gives its values has '
                f"{first.shape[-1]}: heads times value_dim must be the same in both"
            )
        share = (self.value_share + self.value_up(self.value_down(x))).sigmoid()
        return torch.lerp(values, first.to(values.dtype), share.to(values.dtype))

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.config.num_heads, -1))
        return heads
