"""The recurrent block of Griffin and RecurrentGemma (De et al. 2024, arXiv 2402.19427)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.rg_lru import RGLRUConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.rotary import token_positions
from longrecall.ops import linear_recurrence

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}

FASTEST_DECAY = 8.0
"""c of the paper: the log decay of an open gate is -c softplus(decay)."""

STEEPEST_ROOT = 1000.0
"""The derivative of the square root is taken as no more than this: it is infinite where nothing decays."""


class RGLRU(nn.Module):
    r"""A convolution, then one state for every channel; the output is gated by an activation of another projection.

    .. math:: a_t = e^{-8\,\mathrm{softplus}(\Lambda)\,\sigma(W_a x_t + b_a)}, \qquad
              h_t = a_t h_{t-1} + \sqrt{1 - a_t^2}\,(\sigma(W_i x_t + b_i) \circ x_t)

    with :math:`W_a` and :math:`W_i` block-diagonal, a block for each head. The first token of a text is written with
    the factor 1 in the place of the square root, as the published models do: so that the state is as large from the
    beginning on. A text that goes on from a given state has no such token.
    """

    def __init__(self, config: RGLRUConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        inner, heads, width = config.inner_dim, config.num_heads, config.inner_dim // config.num_heads
        self.decay = nn.Parameter(torch.empty(inner))
        for gate in ("input", "decay"):
            self.register_parameter(f"{gate}_gate_weight", nn.Parameter(torch.empty(heads, width, width)))
            self.register_parameter(f"{gate}_gate_bias", nn.Parameter(torch.empty(heads, width)))
        self.in_proj = nn.Linear(hidden_size, inner)
        self.gate_proj = nn.Linear(hidden_size, inner)
        self.conv = ShortConvolution(inner, config.conv_width, bias=True, activation=None)
        self.out_proj = nn.Linear(inner, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """An open gate decays by 0.9 to 0.999 a token, squares uniform in between (the paper, section 2.4)."""
        squares = torch.empty_like(self.decay).uniform_(0.9**2, 0.999**2)
        rate = -0.5 * squares.log() / FASTEST_DECAY
        self.decay.copy_(rate.expm1().log())
        for gate in ("input", "decay"):
            weight = self.get_parameter(f"{gate}_gate_weight")
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            nn.init.zeros_(self.get_parameter(f"{gate}_gate_bias"))

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, 1, 1, I]``)."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        channels, conv_state = self.conv(self.in_proj(x), None if state is None else state["conv"], mask)
        before = None if state is None else state["recurrent"].flatten(1)
        first = token_positions(position, x.shape[1], mask) == 0
        if before is not None:
            first = first & ~before.any(1, keepdim=True)
        written, log_decay = self.gates(channels.to(wide), first)
        h, final = linear_recurrence(
            mask_tokens(written, mask),
            mask_tokens(log_decay, mask),
            initial_state=before,
        )
        gate = ACTIVATIONS[self.config.activation](self.gate_proj(x))
        projected: Tensor = self.out_proj((h * gate.to(wide)).to(x.dtype))
        return projected, {"recurrent": final[:, None, None], "conv": conv_state}

    def gates(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """x ``[B, T, I]`` (float32 or wider), `first` bool ``[B, T]`` -> what is written and the log decay."""
        log_decay = -FASTEST_DECAY * F.softplus(self.decay.to(x.dtype)) * self._gate(x, "decay")
        # 1 - a^2 without cancellation where a is near 1.
        factor: Tensor = _Root.apply(-torch.expm1(2 * log_decay))
        factor = torch.where(first[..., None], 1.0, factor)
        written: Tensor = factor * self._gate(x, "input") * x
        return written, log_decay

    def _gate(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.get_parameter(f"{name}_gate_{kind}").to(x.dtype) for kind in ("weight", "bias"))
        blocks = torch.einsum("bthi,hij->bthj", x.unflatten(-1, bias.shape), weight) + bias
        gate: Tensor = blocks.flatten(-2).sigmoid()
        return gate


class _Root(torch.autograd.Function):
    """The square root with a bounded derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        bounded: Tensor = gradient * (0.5 / root).clamp(max=STEEPEST_ROOT)
        return bounded
