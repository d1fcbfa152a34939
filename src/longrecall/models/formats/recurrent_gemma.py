"""transformers' RecurrentGemma (``model_type: recurrent_gemma``): ``models/recurrent_gemma`` of transformers 5.23.

Layers of real-gated linear recurrent units and of attention with a window, each with a gated MLP of half the
`intermediate_size`. Scales of norms are stored as 1 + w.
"""

from __future__ import annotations

import struct
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.rope import read_rope, written_rope
from longrecall.models.formats.sources import same, squeeze_conv
from longrecall.models.formats.stock import common_fields, find_module, first_module, merged
from longrecall.models.sizes import PlainConfig

RECURRENT, ATTENTION = "recurrent", "attention"
PATTERN = [RECURRENT, RECURRENT, ATTENTION]
ROTARY_SHARE = 0.5
_ACTIVATIONS = {
    "gelu_pytorch_tanh": ("gelu_tanh", "gelu_pytorch_tanh"),
    "gelu": ("gelu", "gelu"),
    "silu": ("silu", "silu"),
    "swish": ("silu", "silu"),
}
"""Name in a config -> its names in `rg_lru` and in `mlp`."""
_NORM = {"offset": 1.0}
_LRU = {
    "in_proj.weight": "linear_x.weight",
    "in_proj.bias": "linear_x.bias",
    "gate_proj.weight": "linear_y.weight",
    "gate_proj.bias": "linear_y.bias",
    "conv.bias": "conv_1d.bias",
    "decay": "rg_lru.recurrent_param",
    "input_gate_weight": "rg_lru.input_gate_weight",
    "input_gate_bias": "rg_lru.input_gate_bias",
    "decay_gate_weight": "rg_lru.recurrent_gate_weight",
    "decay_gate_bias": "rg_lru.recurrent_gate_bias",
    "out_proj.weight": "linear_out.weight",
    "out_proj.bias": "linear_out.bias",
}
"""Tensors of an RG-LRU layer -> those of the file; the weight of the convolution has another shape there."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a RecurrentGemmaConfig (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, count = fields.integer("hidden_size", 2560), fields.integer("num_hidden_layers", 26)
    kinds = _kinds(fields, count)
    activation = str(fields.get("hidden_activation", "gelu_pytorch_tanh"))
    fields.require("hidden_activation", "gelu_pytorch_tanh", list(_ACTIVATIONS), "other activations are missing")
    inner = fields.integer("intermediate_size", 3 * 2560)
    recurrent, attention = _recurrent(fields, hidden, activation), _attention(fields, hidden)
    mlp = {
        "type": "mlp",
        "inner_size": max(inner // 2, 1),
        "activation": _ACTIVATIONS[activation][1],
        "bias": True,
    }
    # transformers' class ignores the first; the others are for training.
    fields.require("embeddings_scale_by_sqrt_dim", True, [True], "embeddings are scaled by the root of hidden_size")
    fields.ignore("attention_dropout", "w_init_variance_scale", "final_w_init_variance_scale")
    tied = fields.flag("tie_word_embeddings", True)
    config = {
        "vocab_size": fields.integer("vocab_size", 256000),
        "hidden_size": hidden,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": tied,
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings"),
        "embedding_multiplier": in_bfloat16(hidden**0.5),
        "logits_soft_cap": fields.number("logits_soft_cap", 30.0),
        "final_norm": _NORM,
        **fields.token_ids(),
    }
    fields.finish()
    layers = [
        {
            "blocks": [
                {"name": "mixer", "module": recurrent if kind == RECURRENT else attention, "norm": _NORM},
                {"name": "mlp", "module": mlp, "norm": _NORM},
            ]
        }
        for kind in kinds
    ]
    sources = {
        "model.embeddings.weight": same("model.embed_tokens.weight"),
        "model.norm.weight": same("model.final_norm.weight"),
    }
    if not tied:
        sources["lm_head.weight"] = same("lm_head.weight")
    for index, kind in enumerate(kinds):
        sources |= _layer_sources(index, kind, attention["qkv_bias"])
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": layers}),
        sources=sources,
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        ignored_suffixes=("rotary_emb.inv_freq", "model.normalizer"),
    )


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the RecurrentGemmaConfig of a native model as plain data; `kept`: the one it was read from, or {}."""
    recurrent, attention = find_module(plain, "rg_lru"), find_module(plain, "attention")
    mlp = first_module(plain, "mlp")
    fields: dict[str, Any] = {
        "model_type": "recurrent_gemma",
        "architectures": ["RecurrentGemmaForCausalLM"],
        **common_fields(plain),
        "rms_norm_eps": plain.norm_eps,
        "logits_soft_cap": plain.logits_soft_cap,
        "hidden_activation": next(
            name for name, (_, ours) in _ACTIVATIONS.items() if ours == mlp.get("activation", "silu")
        ),
    }
    if kept.get("hidden_activation") in _ACTIVATIONS:
        same_function = _ACTIVATIONS[kept["hidden_activation"]] == _ACTIVATIONS[fields["hidden_activation"]]
        fields["hidden_activation"] = kept["hidden_activation"] if same_function else fields["hidden_activation"]
    if kept.get("intermediate_size", 0) // 2 != mlp["inner_size"]:
        fields["intermediate_size"] = 2 * mlp["inner_size"]
    found = [layer["blocks"][0]["module"]["type"] for layer in plain.layers if "blocks" in layer]
    kinds = [RECURRENT if kind == "rg_lru" else kind for kind in found]
    if not kept or _kinds(Fields(kept, ""), len(kinds)) != kinds:
        fields["block_types"] = kinds
    if recurrent is not None:
        fields |= {
            "num_attention_heads": recurrent["num_heads"],
            "lru_width": recurrent["inner_dim"],
            "conv1d_width": recurrent["conv_width"],
        }
        if recurrent["inner_dim"] == plain.hidden_size and "lru_width" in kept:
            # null says the same
            fields["lru_width"] = kept["lru_width"] or plain.hidden_size
    if attention is not None:
        heads = attention["num_heads"]
        usual = "head_dim" not in kept and heads * attention["head_dim"] == plain.hidden_size
        shared = attention["kv_heads"] != heads or kept.get("num_key_value_heads") is not None
        fields |= {
            "num_attention_heads": heads,
            **({} if usual else {"head_dim": attention["head_dim"]}),
            **({"num_key_value_heads": attention["kv_heads"]} if shared else {}),
            "attention_bias": attention["qkv_bias"],
            "attention_window_size": attention["window"],
            **written_rope(attention, kept, share=ROTARY_SHARE),
        }
    return merged(kept, fields)


def in_bfloat16(value: float) -> float:
    """Return a positive number rounded to bfloat16, halves to even: how the class keeps the factor of embeddings."""
    bits = int.from_bytes(struct.pack(">f", value), "big")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack(">f", rounded.to_bytes(4, "big"))[0])


def _kinds(fields: Fields, count: int) -> list[str]:
    """The kind of each layer: the pattern, repeated."""
    pattern = fields.get("block_types", PATTERN)
    known = isinstance(pattern, list) and pattern and all(kind in (RECURRENT, ATTENTION) for kind in pattern)
    if not known:
        raise fields.fail("block_types", f'it must be a list of "{RECURRENT}" and "{ATTENTION}"')
    # The published files say it so. Today's class does not look at it and takes its default.
    fields.require("_block_types", pattern, [pattern], 'its name is "block_types", which says otherwise')
    return [pattern[index % len(pattern)] for index in range(count)]


def _recurrent(fields: Fields, hidden: int, activation: str) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 10)
    inner = fields.optional_integer("lru_width", hidden)
    assert inner is not None
    if inner % heads:
        raise fields.fail("lru_width", f"its channels ({inner}) must be a multiple of num_attention_heads ({heads})")
    return {
        "type": "rg_lru",
        "inner_dim": inner,
        "num_heads": heads,
        "conv_width": fields.integer("conv1d_width", 4),
        "activation": _ACTIVATIONS[activation][0],
    }


def _attention(fields: Fields, hidden: int) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 10)
    rope = read_rope(fields, share=ROTARY_SHARE)
    if rope.get("rope_scaling") is not None:
        raise fields.fail("rope_parameters", "the angles of RecurrentGemma are not stretched")
    return {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.optional_integer("num_key_value_heads", heads),
        "head_dim": fields.optional_integer("head_dim", max(hidden // heads, 1)),
        "window": fields.integer("attention_window_size", 2048),
        "qkv_bias": fields.flag("attention_bias", False),
        "out_bias": True,
        **rope,
    }


def _layer_sources(index: int, kind: str, qkv_bias: bool) -> dict[str, Source]:
    ours, theirs = f"model.layers.{index}.", f"model.layers.{index}."
    found = {
        f"{ours}mixer_norm.weight": same(f"{theirs}temporal_pre_norm.weight"),
        f"{ours}mlp_norm.weight": same(f"{theirs}channel_pre_norm.weight"),
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        for part in ("weight", "bias"):
            found[f"{ours}mlp.{name}.{part}"] = same(f"{theirs}mlp_block.{name}.{part}")
    block = f"{theirs}temporal_block."
    if kind == RECURRENT:
        found[f"{ours}mixer.conv.weight"] = squeeze_conv(same(f"{block}conv_1d.weight"))
        return found | {f"{ours}mixer.{name}": same(f"{block}{foreign}") for name, foreign in _LRU.items()}
    names = [f"{name}_proj.weight" for name in "qkvo"]
    names += [f"{name}_proj.bias" for name in ("qkvo" if qkv_bias else "o")]
    return found | {f"{ours}mixer.{name}": same(f"{block}{name}") for name in names}
