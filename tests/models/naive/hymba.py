"""Hymba as published: memory tokens before the text, fused projections, keys shared between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, convolved, head, rms


def turned(x: Tensor, theta: float) -> Tensor:
    """x ``[B, T, H, P]``, turned by places from 0 on, those of the memory tokens included."""
    width = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None, None] * theta ** -(
        torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin


def base(config: Config, width: int) -> float:
    theta = config.get("rope_theta", 10000.0)
    if config.get("rope_type") != "ntk":
        return float(theta)
    stretch = 2 * config["max_position_embeddings"] / config["orig_max_position_embeddings"] - 1
    return float(theta * stretch ** (width / (width - 2)))


def seen(config: Config, index: int, length: int) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near, window = distance >= 0, config.get("sliding_window")
    if window is not None and index not in config.get("global_attn_idx", range(index + 1)):
        near = near & ((distance <= window) | (torch.arange(length) < config.get("num_memory_tokens", 0)))
    return near


def scan(config: Config, w: Callable[..., Tensor], x: Tensor, gate: Tensor) -> Tensor:
    """Mamba's selective scan, channel by channel and token by token."""
    inner, rank, keys = x.shape[-1], config["mamba_dt_rank"], config["mamba_d_state"]
    taps = w("conv1d.weight", inner, 1, config.get("mamba_d_conv", 4))
    bias = w("conv1d.bias", inner) if config.get("mamba_conv_bias", True) else 0
    x = F.silu(convolved(x, taps) + bias)
    parts = (x @ w("x_proj.0.weight", rank + 2 * keys, inner).T).split([rank, keys, keys], dim=-1)
    if config.get("mamba_inner_layernorms", True):
        sizes = zip(("dt", "B", "C"), parts, strict=True)
        parts = tuple(rms(y, w(f"{name}_layernorm.weight", y.shape[-1], mean=1.0), 1e-6) for name, y in sizes)
    low, b, c = parts
    step = F.softplus(low @ w("dt_proj.0.weight", inner, rank).T + w("dt_proj.0.bias", inner))
    rates, through = -w("A_log.0", inner, keys).exp(), w("D.0", inner)
    state, outputs = x.new_zeros(len(x), inner, keys), []
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t, :, None] * rates)
        state = decay * state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
        outputs.append((state * c[:, t, None]).sum(-1) + through * x[:, t])
    return torch.stack(outputs, 1) * F.silu(gate)


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    d, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    inner, width = d * config.get("mamba_expand", 2), d // heads
    x = w("model.embed_tokens.weight", VOCABULARY, d, size=d**0.5)[ids]
    count = config.get("num_memory_tokens", 0)
    if count:
        memory = w("model.memory_tokens", count, d, size=d**0.5)
        x = torch.cat([memory.expand(len(x), -1, -1), x], 1)
    shared: dict[str, Any] = {}
    firsts = {index: group[0] for group in config.get("kv_reuse_group") or [] for index in group}
    for index in range(config["num_hidden_layers"]):
        block, layer = w.under(f"model.layers.{index}.mamba."), w.under(f"model.layers.{index}.")
        normed = rms(x, layer("input_layernorm.weight", d, mean=1.0), 1e-6)
        takes = firsts.get(index, index) != index
        sizes = [d, *([] if takes else [groups * width, groups * inner // heads]), inner, inner]
        q, *kv, channels, gate = (normed @ block("in_proj.weight", sum(sizes), d).T).split(sizes, dim=-1)
        q = q.unflatten(-1, (heads, width))
        if not takes:
            k, v = (y.unflatten(-1, (groups, -1)) for y in kv)
            shared["k"] = turned(k, base(config, width)) if config.get("rope") else k
            shared["v"] = v
        q = turned(q, base(config, width)) if config.get("rope") else q
        k, v = (shared[name].repeat_interleave(heads // groups, 2) for name in "kv")
        scores = torch.einsum("bihp,bjhp->bhij", q, k) * width**-0.5
        shares = scores.masked_fill(~seen(config, index, x.shape[1]), -torch.inf).softmax(-1)
        read = torch.einsum("bhij,bjhv->bihv", shares, v).flatten(-2)
        scanned = scan(config, block, channels, gate)
        read = rms(read, block("pre_avg_layernorm1.weight", inner, mean=1.0), 1e-6)
        scanned = rms(scanned, block("pre_avg_layernorm2.weight", inner, mean=1.0), 1e-6)
        x = x + (read + scanned) / 2 @ block("out_proj.weight", d, inner).T
        wide = config["intermediate_size"]
        if wide:
            normed = rms(x, layer("pre_moe_layernorm.weight", d, mean=1.0), 1e-6)
            mlp = w.under(f"model.layers.{index}.moe.experts.0.")
            up = normed @ mlp("up_proj.weight", wide, d).T
            if config.get("mlp_hidden_act", "silu") == "silu":
                up = F.silu(normed @ mlp("gate_proj.weight", wide, d).T) * up
            else:
                up = torch.relu(up).square()
            x = x + up @ mlp("down_proj.weight", d, wide).T
    named = {**config, "embedding_name": "model.embed_tokens.weight"}
    return head(named, w, rms(x, w("model.final_layernorm.weight", d, mean=1.0), 1e-6))[:, count:]


SIZES: Config = {
    "model_type": "hymba",
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "mamba_d_state": 3,
    "mamba_dt_rank": 4,
    "num_memory_tokens": 6,
    "num_experts": 1,
    "rope": True,
}
CASES = [
    # A group of two and one of three, as in the 1.5B, with a window that many tokens fall out of.
    Naive(
        "hymba",
        "published",
        SIZES
        | {"num_hidden_layers": 6, "sliding_window": 3, "global_attn_idx": [0], "kv_reuse_group": [[1, 2], [3, 4, 5]]}
        | {"rope_type": "ntk", "max_position_embeddings": 64, "orig_max_position_embeddings": 16, "kq_norm": "none"}
        | {"tie_word_embeddings": True, "attn_implementation_new": "flex", "v_head_dim": 8, "kq_head_dim": -1}
        | {"layer_type": ["h"] * 6, "conv_dim": {str(index): 40 for index in range(6)}, "attn_hidden_size": -1},
        logits,
    ),
    Naive(
        "hymba",
        "without_memory",
        SIZES
        | {"num_memory_tokens": 0, "num_hidden_layers": 2, "mamba_inner_layernorms": False, "rope": False}
        | {"mlp_hidden_act": "relu2", "mamba_conv_bias": False, "num_key_value_heads": 5},
        logits,
    ),
    Naive(
        "hymba",
        "no_mlp",
        SIZES
        | {"intermediate_size": 0, "num_hidden_layers": 3, "mamba_expand": 3, "kv_reuse_group": [[0, 1]]}
        | {"sliding_window": 4, "global_attn_idx": [2], "rope_theta": 500.0, "mamba_d_conv": 3},
        logits,
    ),
]
