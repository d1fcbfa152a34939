"""fla's Mixture of Memories: every token is written to a few of several memories, and to one that all share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, delta_rule, rms, short, transformer, unit


def mixer(config: Config, w: Callable[..., Tensor], x: Tensor, index: int, shared: dict[str, Any]) -> Tensor:
    d, heads, keys = config["hidden_size"], config["num_heads"], config["head_dim"]
    values, memories = round(keys * config.get("expand_v", 1.0)), config["num_memories"]
    sizes = {"k": heads * keys, "v": heads * values, "b": heads, "a": heads}

    def memory(tokens: Tensor, name: Callable[[str], str]) -> Tensor:
        """What the tokens of one row [n, d] read from a memory that they alone are written to."""
        one = tokens[None]
        own = {key: one @ w(name(key), size, d).T for key, size in sizes.items()}
        own["q"] = one @ w("q_proj.weight", heads * keys, d).T
        q, k, v = (short(config, w, key, own[key]).unflatten(-1, (heads, -1)) for key in "qkv")
        decay = torch.exp(-w("A_log", heads).exp() * F.softplus(own["a"] + w("dt_bias", heads)))
        beta = own["b"].sigmoid()
        return delta_rule(unit(q), unit(k)[:, :, None], v[:, :, None], decay[:, :, None, :, None], beta[:, :, None])[0]

    def shared_name(key: str) -> str:
        return f"shared_{key}.weight"

    weights, chosen = (x @ w("gate.weight", memories, d).T).softmax(-1).topk(config["topk"], dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    o = x.new_zeros(*x.shape[:2], heads, values)
    for m in range(memories):
        name = shared_name if config.get("single_kv_proj") else lambda key, m=m: f"{key}_proj.{m}.weight"
        share = (weights * (chosen == m)).sum(-1)
        for row in range(len(x)):
            there = share[row] > 0
            # Asked for once at least, so that the file has the weights of every memory.
            read = memory(x[row][there] if bool(there.any()) else x[row][:1], name)
            if bool(there.any()):
                o[row, there] += share[row][there][:, None, None] * read
    if config.get("shared_mem", True):
        o = o + torch.stack([memory(x[row], shared_name) for row in range(len(x))])
    o = rms(o, w("o_norm.weight", values, mean=1.0), config.get("norm_eps", 1e-6))
    if config.get("use_output_gate", True):
        o = o * F.silu((x @ w("g_proj.weight", heads * values, d).T).unflatten(-1, (heads, values)))
    return o.flatten(-2) @ w("o_proj.weight", d, heads * values).T


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    return transformer(config, w, ids, mixer)


SIZES: Config = {
    "model_type": "mom",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 6,
    "num_memories": 4,
    "topk": 2,
    "intermediate_size": 40,
}
CASES = [
    Naive(
        "fla_mom",
        "published",
        SIZES | {"shared_mem": True, "aux_loss_scale": 0.03, "capacity": 1.0, "mom_backend": "gated_deltanet"},
        logits,
    ),
    Naive(
        "fla_mom",
        "one_projection",
        SIZES | {"single_kv_proj": True, "expand_v": 2.0, "use_output_gate": False, "conv_size": 3},
        logits,
    ),
    Naive(
        "fla_mom",
        "one_active_without_shared",
        SIZES
        | {"topk": 1, "num_memories": 3, "shared_mem": False, "tie_word_embeddings": True, "norm_eps": 1e-3}
        | {"attn": {"layers": [0], "num_heads": 3, "num_kv_heads": 1, "window_size": 4}},
        logits,
    ),
]
