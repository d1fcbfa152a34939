"""Blocks of fla's RWKV-6 and RWKV-7: layer norms around time mixing and channel mixing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Mixer, Weights, attention, attention_of, head


def rwkv(config: Config, w: Weights, ids: Tensor, mixer: Mixer, channel: Callable[..., Tensor]) -> Tensor:
    """`channel(config, weights below the channel mixing, x [B, T, d])`."""
    d, shared = config["hidden_size"], dict[str, Any]()

    def norm(name: str, x: Tensor) -> Tensor:
        bias = w(f"{name}.bias", d) if config.get("norm_bias", True) else None
        return F.layer_norm(x, (d,), w(f"{name}.weight", d, mean=1.0), bias, config.get("norm_eps", 1e-5))

    x = w("model.embeddings.weight", VOCABULARY, d, size=d**0.5)[ids]
    if config.get("norm_first", True):
        x = norm("model.layers.0.pre_norm", x)
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}."
        normed, own, spec = norm(f"{block}attn_norm", x), w.under(f"{block}attn."), attention_of(config, index)
        x = x + (mixer(config, own, normed, index, shared) if spec is None else attention(spec, own, normed))
        x = x + channel(config, w.under(f"{block}ffn."), norm(f"{block}ffn_norm", x))
    return head(config, w, norm("model.norm", x))


def head_norms(o: Tensor, w: Callable[..., Tensor], heads: int, eps: float) -> Tensor:
    """A layer norm of the output of every head o ``[B, T, H, V]``, with a scale and a bias of every channel."""
    flat = o.flatten(0, 1).flatten(1)
    channels = flat.shape[-1]
    normed = F.group_norm(flat, heads, w("g_norm.weight", channels, mean=1.0), w("g_norm.bias", channels), eps)
    return normed.view(*o.shape[:2], channels)


def channel_width(config: Config, ratio: float) -> int:
    given = config.get("intermediate_size")
    wide = int(config["hidden_size"] * (config.get("hidden_ratio") or ratio))
    return -(-wide // 32) * 32 if given is None else int(given)


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()
