"""fla's HGRN2: a table of lower bounds of the forget gates for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY
from tests.models.naive.case import Config, Naive, Weights, convolved, rms, transformer


def mixer(config: Config, w: Callable[..., Tensor], x: Tensor, index: int, shared: dict[str, Any]) -> Tensor:
    d = config["hidden_size"]
    keys = config.get("expand_ratio") or d // config["num_heads"]
    heads = d // keys
    q, raw, v = (
        x @ w(f"{name}_proj.weight", size, d).T for name, size in (("q", heads * keys), ("f", heads * keys), ("i", d))
    )
    if config.get("use_short_conv"):
        q, raw, v = (
            convolved(y, w(f"{name}_conv1d.weight", y.shape[-1], 1, config.get("conv_size", 4)))
            for name, y in (("q", q), ("f", raw), ("i", v))
        )
    forget = raw.sigmoid()
    if "bounds" in shared and index > 0:
        bound = shared["bounds"][index]
        forget = bound + (1 - bound) * forget
    q, forget, v = (y.unflatten(-1, (heads, -1)) for y in (F.silu(q), forget, v))
    state, outputs = x.new_zeros(len(x), heads, keys, d // heads), []
    for t in range(x.shape[1]):
        written = torch.einsum("bhk,bhv->bhkv", 1 - forget[:, t], v[:, t])
        state = forget[:, t, ..., None] * state + written
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * keys**-0.5)
    scale = w("g_norm.weight", d, mean=1.0) if config.get("elementwise_affine", True) else 1.0
    # Whatever norm_eps is.
    return rms(torch.stack(outputs, 1).flatten(-2), scale, 1e-6) @ w("o_proj.weight", d, d).T


def logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    shared = {}
    if config.get("use_lower_bound", True):
        table = w("model.lower_bounds", config["num_hidden_layers"], config["hidden_size"], size=4.0).softmax(0)
        shared["bounds"] = table.cumsum(0) - table[0]
    return transformer(config, w, ids, mixer, shared)


SIZES: Config = {
    "model_type": "hgrn2",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "expand_ratio": 8,
    "intermediate_size": 40,
}
CASES = [
    # Where expand_ratio is given, num_heads is not looked at.
    Naive("fla_hgrn2", "published", SIZES | {"num_heads": 1, "use_lower_bound": True, "norm_eps": 1e-3}, logits),
    Naive(
        "fla_hgrn2",
        "convolutions",
        SIZES | {"expand_ratio": None, "num_heads": 2, "use_short_conv": True, "elementwise_affine": False},
        logits,
    ),
    Naive(
        "fla_hgrn2",
        "hybrid",
        SIZES | {"tie_word_embeddings": True, "attn": {"layers": [0], "num_heads": 3, "window_size": 6}},
        logits,
    ),
    Naive(
        "fla_hgrn2",
        "without_bounds",
        SIZES | {"use_lower_bound": False, "expand_ratio": 5, "hidden_size": 20, "num_hidden_layers": 2},
        logits,
    ),
]
