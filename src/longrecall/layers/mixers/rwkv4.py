"""Time mixing of RWKV-4 (Peng et al. 2023, arXiv 2305.13048)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longrecall.layers.descriptions.rwkv4 import RWKV4Config
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.mixers.rwkv import token_shift
from longrecall.layers.stepping.step import PlainStep, Step, StepSettings
from longrecall.ops import weighted_average

NO_WEIGHT = -1e30
"""A key that counts for nothing (see `ops.weighted_average`)."""


class RWKV4(nn.Module):
    r"""An average of the values so far for every channel, read through a sigmoid gate.

    .. math:: y_t = W_o (\sigma(r_t) \circ \mathrm{average}_t), \qquad r, k, v = W (\mu x_t + (1 - \mu) x_{t-1})

    with a mixture :math:`\mu` for each of r, k and v. The weights of earlier tokens are :math:`e^{k}` and fade by
    :math:`\log w = -e^{decay}` a token; the token itself has the bonus u (`ops.weighted_average`).
    """

    def __init__(self, config: RWKV4Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        for name in "kvr":
            self.register_parameter(f"mix_{name}", nn.Parameter(torch.empty(hidden_size)))
        self.decay = nn.Parameter(torch.empty(config.inner_dim))
        self.bonus = nn.Parameter(torch.empty(config.inner_dim))
        for name in "kvr":
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, config.inner_dim, bias=False))
        self.o_proj = nn.Linear(config.inner_dim, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' constants for a layer halfway up, which needs no layer index."""
        channels = torch.arange(self.get_parameter("mix_k").shape[0], device=self.decay.device)
        share = (channels / channels.numel()).sqrt()
        self.get_parameter("mix_k").copy_(share)
        self.get_parameter("mix_v").copy_(share + 0.15)
        self.get_parameter("mix_r").copy_(share.sqrt())
        inner = torch.linspace(0, 1, self.decay.numel(), device=self.decay.device)
        self.decay.copy_(-5 + 8 * inner**1.35)
        ripple = 0.5 * ((torch.arange(inner.numel(), device=inner.device) + 1) % 3 - 1)
        self.bonus.copy_(math.log(0.3) + ripple)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, 1, 3, I]``, ``shift [B, d, 1]``)."""
        before, shift = token_shift(x, None if state is None else state["shift"], mask)
        change = x - before
        k, v, r = (
            self.get_submodule(f"{name}_proj")(before + change * self.get_parameter(f"mix_{name}")) for name in "kvr"
        )
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        log_decay, k = -self.decay.to(wide).exp(), k.to(wide)
        if mask is not None:
            log_decay = mask_tokens(log_decay.expand_as(k), mask)
            k = torch.where(mask[..., None], k, NO_WEIGHT)
        average, final = weighted_average(
            k,
            v.to(wide),
            log_decay,
            self.bonus.to(wide),
            initial_state=None if state is None else state["recurrent"].squeeze(1),
        )
        projected: Tensor = self.o_proj((r.to(wide).sigmoid() * average).to(x.dtype))
        return projected, {"recurrent": final[:, None], "shift": shift}

    def decoding_step(self, config: RWKV4Config, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return RWKV4Step(config, self, settings)


class RWKV4Step(PlainStep):
    """The forward pass, on a state in float32: logarithms of weights are no numbers for a narrower dtype."""

    def _laid_out(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.contiguous() if name == "recurrent" else super()._laid_out(name, tensor)
