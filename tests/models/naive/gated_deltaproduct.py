"""fla's Gated DeltaProduct: several steps of the delta rule a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, delta_rule, rms, short, transformer, unit


def mixer(config: Config, w: Callable[..., Tensor], x: Tensor, index: int, shared: dict[str, Any]) -> Tensor:
    d, heads, keys, n = config["hidden_size"], config["num_heads"], config["head_dim"], config.get("num_householder", 1)
    values = round(keys * config.get("expand_v", 2.0))
    q = short(config, w, "q", x @ w("q_proj.weight", heads * keys, d).T).unflatten(-1, (heads, keys))
    k = short(config, w, "k", x @ w("k_proj.weight", n * heads * keys, d).T).unflatten(-1, (n, heads, keys))
    v = short(config, w, "v", x @ w("v_proj.weight", n * heads * values, d).T).unflatten(-1, (n, heads, values))
    beta = (x @ w("b_proj.weight", n * heads, d).T).sigmoid().unflatten(-1, (n, heads))
    beta = beta * (2 if config.get("allow_neg_eigval") else 1)
    decay = torch.ones_like(beta)[..., None]
    if config.get("use_forget_gate", False):
        raw = x @ w("a_proj.weight", heads, d).T + w("dt_bias", heads)
        # The state fades before the first step of a token.
        decay[:, :, 0, :, 0] = torch.exp(-w("A_log", heads).exp() * F.softplus(raw))
    o = delta_rule(unit(q), unit(k), v, decay, beta)
    o = rms(o, w("o_norm.weight", values, mean=1.0), config.get("norm_eps", 1e-6))
    if config.get("use_output_gate", True):
        o = o * F.silu((x @ w("g_proj.weight", heads * values, d).T).unflatten(-1, (heads, values)))
    return o.flatten(-2) @ w("o_proj.weight", d, heads * values).T


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    return transformer(config, w, ids, mixer)


SIZES: Config = {
    "model_type": "gated_deltaproduct",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
}
CASES = [
    Naive(
        "fla_gated_deltaproduct",
        "published",
        SIZES | {"use_forget_gate": True, "allow_neg_eigval": True, "num_householder": 2, "fuse_norm": True},
        logits,
    ),
    Naive("fla_gated_deltaproduct", "defaults", SIZES | {"tie_word_embeddings": True, "norm_eps": 1e-3}, logits),
    Naive(
        "fla_gated_deltaproduct",
        "three_steps_without_gates",
        SIZES
        | {"num_householder": 3, "use_output_gate": False, "use_short_conv": False, "expand_v": 1, "num_v_heads": 2}
        | {"attn": {"layers": [0], "num_heads": 3, "rope_theta": 500.0}},
        logits,
    ),
]
