"""A mixture of experts: a router that chooses a few of many MLPs for every token, and what all tokens share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.moe import MoEConfig
from longrecall.layers.experts import Experts
from longrecall.layers.mixers.base import AUXILIARY_LOSS
from longrecall.layers.projections import is_plain
from longrecall.ops.borders import sum_of_pieces


class MixtureOfExperts(nn.Module):
    r"""The weighted sum of a token's experts, and a shared expert where there is one.

    .. math:: y = W_{out} \sum_{e \in \mathrm{top}(x)} w_e\, E_e(W_{in} x) + \sigma(g x)\, E_{shared}(x)

    with the projections W and the gate g only where the description has them. Every token is treated alone and none is
    ever left out, so that padding and the other documents of a row change nothing. How the products with the experts
    are formed is said in layers/experts.py.

    While training with gradients, the layer returns its balance loss beside y: balance * E * sum_e f_e P_e, with f_e
    how many times a real token is sent to expert e on average (these have the sum k), and P_e the mean over the real
    tokens of softmax(logits), or of the sigmoids divided by their sum. This is `load_balancing_loss_func` of
    transformers, for this layer alone: k * balance when all experts are used alike. A model adds up the losses of its
    layers; transformers puts the tokens of all L layers into one such loss, so that `balance` = its coefficient / L is
    as strong, and the same for L = 1. A layer cannot make up for another here.
    """

    correction_bias: Tensor | None

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        width = hidden_size if config.latent_size is None else config.latent_size
        self.router = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.experts = Experts(
            config.num_experts, width, config.inner_size, gated=config.gated, activation=config.activation
        )
        latent = config.latent_size is not None
        self.latent_in = nn.Linear(hidden_size, width, bias=config.bias) if latent else None
        self.latent_out = nn.Linear(width, hidden_size, bias=config.bias) if latent else None
        self.shared = None if config.shared is None else config.shared.build(hidden_size)
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if config.shared_gate else None
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.correction_bias else None
        self.register_buffer("correction_bias", bias)

    def reset_parameters(self) -> None:
        """No correction."""
        if self.correction_bias is not None:
            nn.init.zeros_(self.correction_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`to()`, `bfloat16()` and the like; the correction stays in float32.

        Scores lie close to each other: with a rounded correction other experts would be chosen.
        """
        before = self.correction_bias
        cast(Any, super())._apply(fn, recurse)
        if before is not None and self.correction_bias is not None and self.correction_bias.dtype != before.dtype:
            self.correction_bias = before.to(self.correction_bias.device)
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """x ``[..., d]`` -> y ``[..., d]``; while training with gradients also ``{"auxiliary_loss": ...}``.

        `mask` bool ``[...]``: real tokens; it has a part in the loss alone.
        """
        rows = x.flatten(0, -2)
        weights, chosen, shares = self.route(rows)
        y: Tensor = self.experts(rows if self.latent_in is None else self.latent_in(rows), chosen, weights)
        y = y if self.latent_out is None else self.latent_out(y)
        if self.shared is not None:
            shared = self.shared(rows)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(rows).sigmoid())
        y = y.view(x.shape)
        if not (self.training and self.config.balance and torch.is_grad_enabled()):
            return y
        real = None if mask is None else mask.flatten()
        return y, {AUXILIARY_LOSS: self.config.balance * balance_loss(shares, chosen, real)}

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where tokens x ``[T, d]`` go.

        Returns weights ``[T, k]``, the experts int64 ``[T, k]`` and the shares ``[T, E]`` of all experts, which have
        the sum 1; weights and shares in float32, or float64.
        """
        config, logits = self.config, self._logits(x)
        if config.router == "sigmoid":
            scores = logits.sigmoid()
            shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
            chosen = self._choose(scores.detach())
            weights = scores.gather(-1, chosen)
        elif config.router == "softmax":
            shares = logits.softmax(-1)
            weights, chosen = shares.topk(config.top_k, dim=-1)
        else:
            shares = logits.softmax(-1)
            largest, chosen = logits.topk(config.top_k, dim=-1)
            weights = largest.softmax(-1)
        if config.normalise and config.router != "top_k_softmax":
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return weights if config.scale == 1 else weights * config.scale, chosen, shares

    def _logits(self, x: Tensor) -> Tensor:
        """``[T, d]`` -> ``[T, E]`` in float32, or float64."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if not (self.config.router_in_fp32 and is_plain(self.router)):
            logits: Tensor = self.router(x)
            return logits.to(wide)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.router.weight.to(wide))

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts ``[T, k]`` with the largest corrected scores ``[T, E]``, within the best groups."""
        config = self.config
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if config.active_groups < config.groups:
            grouped = scores.unflatten(-1, (config.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.active_groups, dim=-1).indices
            shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            scores = grouped.masked_fill(shut[..., None], -torch.inf).flatten(-2)
        return scores.topk(config.top_k, dim=-1).indices


def balance_loss(shares: Tensor, chosen: Tensor, real: Tensor | None = None) -> Tensor:
    """E * sum_e f_e P_e: of shares ``[T, E]``, chosen experts ``[T, k]`` and which tokens count, bool ``[T]``.

    Equations 4 to 6 of Fedus et al. 2021; k when all experts are used alike, and larger the more they differ.
    In a piece of a sequence it is the loss of all pieces, with the gradient of this rank's part.
    """
    counted = shares.new_ones(len(shares)) if real is None else real.to(shares.dtype)
    sent = shares.new_zeros(shares.shape[1])
    sent = sent.scatter_add(0, chosen.flatten(), counted.repeat_interleave(chosen.shape[1]))
    total = sum_of_pieces(counted.sum()).clamp(min=1)
    sent, mean = sum_of_pieces(sent) / total, sum_of_pieces((shares * counted[:, None]).sum(0)) / total
    return shares.shape[1] * (sent * mean).sum()
