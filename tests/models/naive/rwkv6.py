"""fla's RWKV-6: shares of the token before that depend on the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, before
from tests.models.naive.rwkv_blocks import channel_width, head_norms, rwkv, squared_relu


def mixer(config: Config, w: Callable[..., Tensor], x: Tensor, index: int, shared: dict[str, Any]) -> Tensor:
    d, heads, rank = config["hidden_size"], config["num_heads"], config["proj_low_rank_dim"]
    keys, values = (round(d * config.get(key, default)) for key, default in (("expand_k", 0.5), ("expand_v", 1.0)))
    delta, gate_rank = before(x), config["gate_low_rank_dim"]
    low = torch.tanh((x + delta * w("x_proj.0.mu", d)) @ w("x_proj.0.linear.weight", 5 * rank, d).T)
    shares = torch.einsum(
        "btnr,hnr->btnh", low.unflatten(-1, (5, rank)), w("x_proj.2.weight", d, 5 * rank).view(d, 5, rank)
    )
    r, decay, k, v, g = (x + delta * share for share in (shares + w("x_bias", 5, d)).unbind(-2))
    r, k, v, g = (
        y @ w(f"{name}_proj.linear.weight", n, d).T
        for name, y, n in (("r", r, keys), ("k", k, keys), ("v", v, values), ("g", g, values))
    )
    raw = torch.tanh(decay @ w("w_proj.linear.lora.0.weight", gate_rank, d).T)
    raw = raw @ w("w_proj.linear.lora.2.weight", keys, gate_rank).T + w("w_proj.linear.lora.2.bias", keys, mean=-1.0)
    r, k, v, decay = (y.unflatten(-1, (heads, -1)) for y in (r, k, v, torch.exp(-torch.exp(raw))))
    bonus = w("bonus", heads, keys // heads)
    state, outputs = x.new_zeros(len(x), heads, keys // heads, values // heads), []
    for t in range(x.shape[1]):
        new = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state + bonus[..., None] * new))
        state = decay[:, t, ..., None] * state + new
    o = head_norms(torch.stack(outputs, 1), w, heads, config.get("norm_eps", 1e-5)) * F.silu(g)
    return o @ w("o_proj.weight", d, values).T


def channel(config: Config, w: Callable[..., Tensor], x: Tensor) -> Tensor:
    d, inner, delta = config["hidden_size"], channel_width(config, 3.5), before(x)
    key = squared_relu((x + delta * w("key.mu", d)) @ w("key.linear.weight", inner, d).T)
    receptance = (x + delta * w("receptance.mu", d)) @ w("receptance.linear.weight", d, d).T
    return receptance.sigmoid() * (key @ w("value.weight", d, inner).T)


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    return rwkv(config, w, ids, mixer, channel)


SIZES: Config = {
    "model_type": "rwkv6",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 3,
    "proj_low_rank_dim": 4,
    "gate_low_rank_dim": 6,
}
CASES = [
    Naive(
        "fla_rwkv6",
        "published",
        SIZES | {"expand_k": 1.0, "expand_v": 1, "hidden_ratio": 3.5, "intermediate_size": None, "fuse_norm": True},
        logits,
    ),
    Naive(
        "fla_rwkv6",
        "narrow_keys",
        SIZES
        | {"norm_first": False, "norm_bias": False, "norm_eps": 1e-3, "intermediate_size": 40, "num_heads": 2}
        | {"tie_word_embeddings": True},
        logits,
    ),
    Naive(
        "fla_rwkv6",
        "hybrid",
        SIZES | {"expand_v": 2.0, "hidden_ratio": 1.4, "attn": [{"layers": [0], "num_heads": 3, "rope_theta": 300.0}]},
        logits,
    ),
]
