"""fla's Kimi Delta Attention: a decay of every key channel, an output gate of low rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, delta_rule, rms, short, transformer, unit


def mixer(config: Config, w: Callable[..., Tensor], x: Tensor, index: int, shared: dict[str, Any]) -> Tensor:
    d, heads, keys = config["hidden_size"], config["num_heads"], config["head_dim"]
    values, groups = round(keys * config.get("expand_v", 1.0)), config.get("num_v_heads") or heads
    q = short(config, w, "q", x @ w("q_proj.weight", heads * keys, d).T).unflatten(-1, (heads, keys))
    k = short(config, w, "k", x @ w("k_proj.weight", heads * keys, d).T).unflatten(-1, (heads, keys))
    v = short(config, w, "v", x @ w("v_proj.weight", groups * values, d).T).unflatten(-1, (groups, values))
    raw = x @ w("f_proj.0.weight", values, d).T @ w("f_proj.1.weight", groups * keys, values).T
    raw = (raw + w("dt_bias", groups * keys)).unflatten(-1, (groups, keys))
    rate, floor = w("A_log", groups).exp()[:, None], config.get("lower_bound")
    log_decay = -rate * F.softplus(raw) if floor is None else floor * (rate * raw).sigmoid()
    beta = (x @ w("b_proj.weight", groups, d).T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
    q, k = (unit(y).repeat_interleave(groups // heads, 2) for y in (q, k))
    o = delta_rule(q, k[:, :, None], v[:, :, None], log_decay.exp()[:, :, None], beta[:, :, None])
    gate = x @ w("g_proj.0.weight", values, d).T @ w("g_proj.1.weight", groups * values, values).T
    gate = (gate + w("g_proj.1.bias", groups * values)).unflatten(-1, (groups, values)).sigmoid()
    o = rms(o, w("o_norm.weight", values, mean=1.0), config.get("norm_eps", 1e-6)) * gate
    return o.flatten(-2) @ w("o_proj.weight", d, groups * values).T


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    return transformer(config, w, ids, mixer)


SIZES: Config = {
    "model_type": "kda",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
}
CASES = [
    Naive("fla_kda", "published", SIZES | {"hidden_act": "swish", "use_l2warp": True, "fuse_norm": True}, logits),
    Naive(
        "fla_kda",
        "value_heads_and_floor",
        SIZES
        | {"num_v_heads": 4, "expand_v": 0.5, "lower_bound": -5.0, "safe_gate": True, "allow_neg_eigval": True}
        | {"conv_size": 3, "norm_eps": 1e-3},
        logits,
    ),
    Naive(
        "fla_kda",
        "hybrid_without_convolution",
        SIZES
        | {"use_short_conv": False, "expand_v": 2, "tie_word_embeddings": True}
        | {"attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "window_size": 5, "qkv_bias": True}},
        logits,
    ),
]
