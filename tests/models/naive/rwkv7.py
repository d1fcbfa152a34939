"""fla's RWKV-7: the generalised delta rule, values of the first layer mixed into those of later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, before
from tests.models.naive.rwkv_blocks import channel_width, head_norms, rwkv, squared_relu

RANKS = {"w": ("decay", 2.5), "a": ("a", 2.5), "v": ("v", 1.7), "g": ("gate", 5.0)}


def rank(config: Config, name: str) -> int:
    key, factor = RANKS[name]
    given = config[f"{key}_low_rank_dim"]
    wide = 1 if name == "g" else head_width(config) / 64
    return max(32, round(factor * config["hidden_size"] ** 0.5 * wide / 32) * 32) if given is None else int(given)


def head_width(config: Config) -> int:
    return int(config["hidden_size"] // config["num_heads"] if config["head_dim"] is None else config["head_dim"])


def mixer(config: Config, w: Callable[..., Tensor], x: Tensor, index: int, shared: dict[str, Any]) -> Tensor:
    d, keys = config["hidden_size"], head_width(config)
    heads, values = d // keys, (config.get("value_dim") or [d])[0]
    mixed = {name: x + before(x) * w(f"x_{name}", 1, 1, d) for name in "rwkvag"}

    def low_rank(name: str, wide: int, inside: Callable[[Tensor], Tensor], bias: bool = True) -> Tensor:
        inner = inside(mixed[name] @ w(f"{name}_lora.lora.0.weight", rank(config, name), d).T)
        outer = inner @ w(f"{name}_lora.lora.2.weight", wide, rank(config, name)).T
        return outer + w(f"{name}_lora.lora.2.bias", wide) if bias else outer

    r, k, v = (mixed[name] @ w(f"{name}_proj.weight", n, d).T for name, n in (("r", d), ("k", d), ("v", values)))
    decay = torch.exp(-0.6065306597126334 * low_rank("w", d, torch.tanh).sigmoid())
    if index == 0:
        shared["first"] = v
    else:
        v = torch.lerp(v, shared["first"], low_rank("v", values, lambda y: y).sigmoid())
    a = low_rank("a", d, lambda y: y).sigmoid()
    g = low_rank("g", values, torch.sigmoid, bias=False)
    removed = F.normalize((k * w("k_k", d, mean=1.0)).unflatten(-1, (heads, keys)), dim=-1)
    k = k * (1 + (a - 1) * w("k_a", d))
    r, k, v, decay, a = (y.unflatten(-1, (heads, -1)) for y in (r, k, v, decay, a))
    state, outputs = x.new_zeros(len(x), heads, keys, values // heads), []
    for t in range(x.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", -removed[:, t], state)
        state = decay[:, t, ..., None] * state + torch.einsum("bhk,bhv->bhkv", removed[:, t] * a[:, t], read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
    o = head_norms(torch.stack(outputs, 1), w, heads, keys * config.get("norm_eps", 1e-5))
    o = o + ((r * k * w("r_k", heads, keys)).sum(-1, keepdim=True) * v).flatten(-2)
    return (o * g) @ w("o_proj.weight", d, values).T


def channel(config: Config, w: Callable[..., Tensor], x: Tensor) -> Tensor:
    d, inner = config["hidden_size"], channel_width(config, 4)
    key = (x + before(x) * w("x_k", d)) @ w("key.weight", inner, d).T
    return squared_relu(key) @ w("value.weight", d, inner, size=0.5).T


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    return rwkv(config, w, ids, mixer, channel)


def one_tensor_of_shares(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As files of fla's first RWKV-7 have it."""
    found = {name: tensor for name, tensor in tensors.items() if ".attn.x_" not in name}
    for name in tensors:
        if name.endswith(".attn.x_r"):
            each = [tensors[name[:-1] + letter].flatten() for letter in "rwkvag"]
            found[name[:-1] + "x"] = torch.stack(each)
    return found


SIZES: Config = {
    "model_type": "rwkv7",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "decay_low_rank_dim": 4,
    "a_low_rank_dim": 5,
    "gate_low_rank_dim": 6,
    "v_low_rank_dim": 3,
}
CASES = [
    # Published files have a wrong num_heads beside head_dim.
    Naive(
        "fla_rwkv7",
        "published",
        SIZES
        | {"num_heads": 32, "hidden_ratio": 4.0, "intermediate_size": 96, "value_dim": [24] * 3, "norm_first": True}
        | {"norm_bias": True, "norm_eps": 1e-5, "fuse_norm": False, "hidden_act": "sqrelu", "attn": None},
        logits,
        one_tensor_of_shares,
    ),
    Naive(
        "fla_rwkv7",
        "wide_values",
        SIZES
        | {"num_heads": 2, "head_dim": None, "value_dim": [48] * 3, "norm_first": False, "norm_bias": False}
        | {"norm_eps": 1e-3, "hidden_ratio": 2, "tie_word_embeddings": True},
        logits,
    ),
    Naive(
        "fla_rwkv7",
        "hybrid_with_computed_ranks",
        SIZES
        | {name: None for name in SIZES if name.endswith("rank_dim")}
        | {"attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "window_size": 5, "qkv_bias": True}},
        logits,
    ),
]
