"""Tiny models in the image of the hybrids that people use: all ways in which layers of several kinds come together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

WIDTH = 32
GEMMA = {"kind": "rms", "offset": 1.0}
LAYER_NORM = {"kind": "layer", "bias": True, "eps": 1e-5}
MLP = {"type": "mlp", "inner_size": 24}
GATED_DELTA = {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
GATED_ATTENTION = {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8, "output_gate": True} | {
    "qk_norm": "head",
    "qk_norm_offset": 1.0,
    "rotary_share": 0.5,
}
MAMBA2 = {"type": "mamba2", "inner_dim": 64, "head_dim": 16, "state_dim": 4, "groups": 2}
PLAIN_ATTENTION = {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8, "rotary_share": 0.0}
SIGMOID_EXPERTS = {"type": "moe", "num_experts": 4, "top_k": 2, "inner_size": 8, "router": "sigmoid"} | {
    "correction_bias": True,
    "gated": False,
    "activation": "relu2",
    "shared_size": 12,
    "scale": 2.5,
}
SQUARED = MLP | {"gated": False, "activation": "relu2"}
PARALLEL = {
    "type": "parallel",
    "attention": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8},
    "ssm": MAMBA2 | {"gated_norm": "none", "part_multipliers": [0.5, 1.25, 0.75, 1.5, 0.25]},
    "attention_output_multiplier": 0.75,
    "ssm_input_multiplier": 1.5,
}
KDA = {"type": "kda", "num_heads": 3, "key_dim": 6, "value_dim": 10}
MLA = {"type": "mla", "num_heads": 3, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 5, "rotary": False}
RWKV7 = {"type": "rwkv7", "input_dim": WIDTH, "num_heads": 4, "key_dim": 8, "value_dim": 8, "decay_rank": 4} | {
    "rate_rank": 4,
    "gate_rank": 6,
}
CHANNEL = {"type": "rwkv7_channel", "input_dim": WIDTH, "inner_dim": 24}
RG_LRU = {"type": "rg_lru", "inner_dim": 30, "num_heads": 3}
LOCAL = {"type": "attention", "num_heads": 4, "kv_heads": 1, "head_dim": 8, "window": 9}


def layer(*modules: dict[str, Any], norm: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A token mixer, and perhaps a channel mixer, after norms of one kind; `more` of every block."""
    extra = more | ({} if norm is None else {"norm": norm})
    names = ("mixer", "mlp")
    return {"blocks": [{"name": name, "module": module, **extra} for name, module in zip(names, modules, strict=False)]}


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen": {
        "final_norm": GEMMA,
        "layers": [
            layer(GATED_DELTA, MLP, norm=GEMMA),
            layer(GATED_ATTENTION, MLP, norm=GEMMA),
            layer(GATED_DELTA, MLP, norm=GEMMA),
        ],
    },
    "nemotron": {"layers": [layer(m) for m in (MAMBA2, SIGMOID_EXPERTS, MAMBA2, SQUARED, PLAIN_ATTENTION)]},
    "falcon": {
        "embedding_multiplier": 3.0,
        "logits_multiplier": 0.5,
        "layers": [layer(PARALLEL, MLP | {"gate_multiplier": 0.75, "output_multiplier": 1.25})] * 2,
    },
    "kimi": {
        "layers": [
            layer(KDA, MLP),
            layer(KDA, SIGMOID_EXPERTS | {"gated": True, "activation": "silu"}),
            layer(MLA, SIGMOID_EXPERTS | {"gated": True, "activation": "silu", "groups": 2, "active_groups": 1}),
        ],
    },
    "rwkv": {
        "embedding_norm": LAYER_NORM,
        "final_norm": LAYER_NORM,
        "layers": [
            layer(RWKV7 | {"gives_values": True}, CHANNEL, norm=LAYER_NORM),
            layer(RWKV7 | {"value_rank": 3}, CHANNEL, norm=LAYER_NORM),
        ],
    },
    "griffin": {
        "embedding_multiplier": WIDTH**0.5,
        "logits_soft_cap": 30.0,
        "layers": [layer(m, MLP, norm=GEMMA) for m in (RG_LRU, RG_LRU, LOCAL)],
    },
}
"""Qwen3.5, Nemotron-H with experts, Falcon-H1, Kimi-Linear, RWKV-7, RecurrentGemma."""

LAYER_TYPES = {
    "qwen": ["linear_attention", "full_attention", "linear_attention"],
    "nemotron": ["linear_attention", "moe", "linear_attention", "moe", "full_attention"],
    "falcon": ["linear_attention"] * 2,
    "kimi": ["linear_attention", "linear_attention", "full_attention"],
    "rwkv": ["linear_attention"] * 2,
    "griffin": ["linear_attention", "linear_attention", "sliding_attention"],
}


def hybrid_config(name: str) -> RecurrentConfig:
    """The config of a model of `HYBRIDS`, for the byte tokenizer."""
    return RecurrentConfig(vocab_size=258, hidden_size=WIDTH, context_length=48, **HYBRIDS[name])


def hybrid(name: str, seed: int = 0) -> RecurrentLM:
    """A model of `HYBRIDS` whose layers all matter: norms and biases are drawn too."""
    torch.manual_seed(seed)
    config = hybrid_config(name)
    config.initializer_range = 0.15
    model = RecurrentLM(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save_hybrid(name: str, folder: Path, surgery: list[dict[str, Any]] | None = None) -> Path:
    """Write the model with the byte tokenizer."""
    save(hybrid(name), folder, byte_tokenizer(), surgery)
    return folder
