"""Time mixing of RWKV-5 (Eagle) and RWKV-6 (Finch), Peng et al. 2024.

Both look one token back (token shift), decay every key channel by itself and give the current token a weight of its
own. RWKV-5 has learned constants for the shift and the decay; in RWKV-6 both depend on the token, by low-rank maps.
Their channel mixing is rwkv_channel.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.rwkv import RWKV5Config, RWKV6Config
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import GroupNorm
from longrecall.ops import bonus_linear_attention
from longrecall.ops.execution import context
from longrecall.ops.neighbours import inputs_after, inputs_before
from longrecall.ops.time_mixing.op import mix_with_previous


class TimeMixing(nn.Module):
    """What both have: projections, decay, bonus, the norm of every head and the gate. Subclasses mix the inputs."""

    def __init__(self, config: RWKV5Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        keys, values = config.num_heads * config.key_dim, config.num_heads * config.value_dim
        self.mix = nn.Parameter(torch.empty(config.mixes, hidden_size))
        self.r_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.g_proj = nn.Linear(hidden_size, values, bias=False)
        self.decay = nn.Parameter(torch.empty(keys))
        self.bonus = nn.Parameter(torch.empty(config.num_heads, config.key_dim))
        self.o_norm = GroupNorm(config.num_heads, values, eps=config.norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initialisation for a layer halfway up, which needs no layer index.

        Decays of a step from exp(-0.0025) to exp(-0.37), bonuses from 0.5 down to 0 with a ripple that tells
        neighbours apart, and a share of the token before that falls from 1 to 0 over the channels.
        """
        keys = torch.linspace(0, 1, self.decay.numel(), device=self.decay.device)
        self.decay.copy_(-6 + 5 * keys**1.35)
        ripple = 0.1 * ((torch.arange(keys.numel(), device=keys.device) + 1) % 3 - 1)
        self.bonus.copy_((0.5 * (1 - keys) + ripple).view_as(self.bonus))
        channels = torch.arange(self.mix.shape[1], device=self.mix.device) / self.mix.shape[1]
        self.mix.copy_(1 - channels.sqrt())
        self.mix[0].copy_(1 - channels**0.25)
        self.mix[2].sub_(0.15)
        self.mix[3].copy_(1 - channels**0.25)

    def attend(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        log_decay: Tensor,
        state: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Inputs of r, k, v, gate ``[B, T, d]`` and the decay ``[B, T, H * K]`` -> y ``[B, T, d]``, final state."""
        config, dtype = self.config, inputs[0].dtype
        wide = log_decay.dtype
        r, k, v = (
            projection(x).unflatten(-1, (config.num_heads, -1))
            for projection, x in zip((self.r_proj, self.k_proj, self.v_proj), inputs[:3], strict=True)
        )
        log_decay = mask_tokens(log_decay.unflatten(-1, (config.num_heads, -1)), mask)
        o, final = bonus_linear_attention(
            r, mask_tokens(k, mask), v.to(wide), log_decay, self.bonus, initial_state=state
        )
        projected: Tensor = self.o_proj(self.o_norm(o, self.g_proj(inputs[3]), dtype))
        return projected, final


class RWKV5(TimeMixing):
    """log decay = -exp(decay), constant in time; the rows of `mix` belong to r, k, v and the gate."""

    def __init__(self, config: RWKV5Config, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.reset_parameters()

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, K, V]``, ``shift [B, d, 1]``)."""
        if state is None and mask is None and context() is None:
            (r, k, v, gate), shift = mix_with_previous(x, self.mix), x[:, -1:].transpose(1, 2)
        else:
            before, shift = token_shift(x, None if state is None else state["shift"], mask)
            change = before - x
            r, k, v, gate = (x + change * share for share in self.mix)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        log_decay = (-self.decay.to(wide).exp()).expand(*x.shape[:2], -1)
        y, final = self.attend((r, k, v, gate), log_decay, None if state is None else state["recurrent"], mask)
        return y, {"recurrent": final, "shift": shift}


class RWKV6(TimeMixing):
    """log decay = -exp(decay + a low-rank map of the token); the rows of `mix` belong to r, k, v, the gate, the decay.

    How far each of the five looks back is `mix` plus a low-rank map of x mixed by `mix_x`.
    """

    def __init__(self, config: RWKV6Config, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.mix_x = nn.Parameter(torch.empty(hidden_size))
        self.mix_down = nn.Linear(hidden_size, config.mixes * config.mix_rank, bias=False)
        self.mix_up = nn.Parameter(torch.empty(config.mixes, config.mix_rank, hidden_size))
        self.decay_down = nn.Linear(hidden_size, config.decay_rank, bias=False)
        self.decay_up = nn.Linear(config.decay_rank, self.decay.numel(), bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As RWKV-5; the maps of the shift begin small, but not at zero, where their inner half has no gradient."""
        super().reset_parameters()
        self.mix_x.copy_(self.mix[1])
        nn.init.uniform_(self.mix_up, -0.01, 0.01)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, K, V]``, ``shift [B, d, 1]``)."""
        before, shift = token_shift(x, None if state is None else state["shift"], mask)
        change = before - x
        inner = torch.tanh(self.mix_down(x + change * self.mix_x)).unflatten(-1, (self.config.mixes, -1))
        shares = torch.einsum("btnr,nrd->nbtd", inner, self.mix_up) + self.mix[:, None, None]
        r, k, v, gate, slow = (x + change * share for share in shares)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        moved = self.decay_up(torch.tanh(self.decay_down(slow)))
        log_decay = -(self.decay.to(wide) + moved.to(wide)).exp()
        y, final = self.attend((r, k, v, gate), log_decay, None if state is None else state["recurrent"], mask)
        return y, {"recurrent": final, "shift": shift}


def token_shift(x: Tensor, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The input before each token, padding skipped as if it were not there.

    x ``[B, T, d]``, the last input so far ``[B, d, 1]`` (None = zeros), mask bool ``[B, T]`` -> ``[B, T, d]``
    (arbitrary where padded) and the new last input ``[B, d, 1]``.
    """
    last = x.new_zeros((x.shape[0], 1, x.shape[2])) if state is None else state.to(x.dtype).transpose(1, 2)
    last = inputs_before(x, last, mask)
    history = torch.cat([last, x], dim=1)
    if mask is not None:
        # Entry t of history is token t - 1: where the newest real one lies before each token, and after the last.
        places = torch.arange(1, x.shape[1] + 1, device=x.device).expand_as(mask)
        newest = F.pad(torch.where(mask, places, 0), (1, 0)).cummax(1).values
        history = history.gather(1, newest[..., None].expand_as(history))
    before, after = inputs_after(history[:, :-1], history[:, -1:], mask)
    return before, after.transpose(1, 2)
