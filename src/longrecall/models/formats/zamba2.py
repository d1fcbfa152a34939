"""Zamba2 (``model_type: zamba2``): ``models/zamba2`` of transformers 5.23.

Mamba-2 layers; in front of some of them stands a block of attention and an MLP, whose weights several layers share.
The file has a shared block, with the adapters of all its layers, in the first layer that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.mlp import OTHER_NAMES
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import (
    RECURRENT,
    activation,
    layer_kinds,
    module_sources,
    no_dropout,
    rotation_fields,
    written_kinds,
    written_rope,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same
from longrecall.models.formats.stock import common_fields, expansion, first_module, merged, modules
from longrecall.models.sizes import PlainConfig

HYBRID = "hybrid"
_PUBLISHED_KINDS = [
    *[RECURRENT] * 6,
    *([HYBRID] + [RECURRENT] * 5) * 6,
    *[HYBRID, *[RECURRENT] * 4, HYBRID, *[RECURRENT] * 3, HYBRID, *[RECURRENT] * 2],
]
"""What the class takes for a config without a list: the layers of Zamba2-2.7B."""
_GATED_NORM_EPS = 1e-5
"""Which no config changes."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a Zamba2Config (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, eps = fields.integer("hidden_size", 2560), fields.number("rms_norm_eps", 1e-5)
    kinds, block = _kinds(fields), _block(fields, hidden, eps)
    uses = [index for index, kind in enumerate(kinds) if kind == HYBRID]
    fields.require("hybrid_layer_ids", uses, [uses], "it follows from layers_block_type")
    owners = uses[: fields.integer("num_mem_blocks", 1)]
    # Training, initialisation and speed, numbers that follow from others, and what the class does not read.
    fields.ignore("time_step_max", "time_step_floor", "chunk_size", "use_mem_eff_path")
    fields.ignore("use_mamba_kernels", "num_logits_to_keep", "use_conv_bias", "kv_channels", "num_query_groups")
    config = {
        "vocab_size": fields.integer("vocab_size", 32000),
        "hidden_size": hidden,
        "norm_eps": eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings", 4096),
        **fields.token_ids(),
    }
    fields.finish()
    tied = config["tie_word_embeddings"]
    sources = {
        "model.embeddings.weight": same("model.embed_tokens.weight"),
        "model.norm.weight": same("model.final_layernorm.weight"),
    }
    sources |= {} if tied else {"lm_head.weight": same("lm_head.weight")}
    # A layer -> which of the uses of a shared block it is.
    places = {layer: use for use, layer in enumerate(uses)}
    layers: list[dict[str, Any]] = []
    for index in range(len(kinds)):
        place = f"model.layers.{index}."
        if index not in places:
            layers.append({"mixer": block["mixer"], "mlp_size": 0})
            sources[f"{place}mixer_norm.weight"] = same(f"{place}input_layernorm.weight")
            sources |= module_sources(block["mixer"], hidden, f"{place}mixer.", f"{place}mamba.")
            continue
        owner = owners[places[index] % len(owners)]
        module = block if owner == index else {**block, "weights_of": owner}
        layers.append({"blocks": [{"name": "mixer", "module": module, "norm": None}]})
        theirs = f"model.layers.{owner}.shared_transformer."
        sources |= _block_sources(module, hidden, place, theirs, places[index])
    plain = PlainConfig.from_dict({**config, "layers": layers})
    return Layout(plain, sources, copies={"lm_head.weight": "model.embeddings.weight"} if tied else {})


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the Zamba2Config of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: no layer has a shared block.
    """
    block = first_module(plain, "shared_block")
    mamba2, attention = block["mixer"], block["attention"]
    if mamba2["type"] != "mamba2":
        raise UserError(f"the mixer of a shared_block is {mamba2['type']}; in Zamba2 it is mamba2")
    kinds = [HYBRID if modules(layer)[0]["type"] == "shared_block" else RECURRENT for layer in plain.layers]
    uses = [index for index, kind in enumerate(kinds) if kind == HYBRID]
    owners = sum("weights_of" not in module or module["weights_of"] is None for module in _shared(plain))
    heads = mamba2["inner_dim"] // mamba2["head_dim"]
    named = "layer_types" if "layer_types" in kept and "layers_block_type" not in kept else "layers_block_type"
    # Blocks that are fewer than they are said to be are all different anyway.
    said = kept.get("num_mem_blocks", owners)
    fields = {
        "model_type": "zamba2",
        "architectures": ["Zamba2ForCausalLM"],
        **common_fields(plain),
        named: written_kinds(kept.get(named), kinds),
        "mamba_d_state": mamba2["state_dim"],
        "mamba_d_conv": mamba2["conv_width"],
        "mamba_expand": expansion(kept, "mamba_expand", mamba2["inner_dim"], plain.hidden_size),
        "mamba_ngroups": mamba2["groups"],
        "n_mamba_heads": heads,
        "time_step_min": mamba2["time_step_limit"][0],
        "add_bias_linear": block["bias"],
        "intermediate_size": block["mlp_size"],
        "hidden_act": _written_activation(kept.get("hidden_act"), block["activation"]),
        "num_attention_heads": attention["num_heads"],
        "num_key_value_heads": attention["kv_heads"],
        "num_mem_blocks": said if owners == len(uses) <= said else owners,
        "use_shared_attention_adapter": block["attention_adapters"],
        "adapter_rank": block["adapter_rank"],
        "rms_norm_eps": plain.norm_eps,
        **_written_rope(kept, attention),
    }
    derived = {
        "mamba_headdim": mamba2["head_dim"],
        "attention_head_dim": attention["head_dim"],
        "attention_hidden_size": attention["input_size"],
        "hybrid_layer_ids": uses,
    }
    return merged(kept, fields | {name: value for name, value in derived.items() if name in kept})


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of every layer, in transformers' newer names."""
    layers = fields.integer("num_hidden_layers", 54)
    name = "layer_types" if "layers_block_type" not in fields.raw else "layers_block_type"
    given = fields.get(name)
    kinds = layer_kinds(fields, name, _PUBLISHED_KINDS if given is None else given, (RECURRENT, HYBRID))
    if len(kinds) != layers:
        raise fields.fail("num_hidden_layers", f'but "{name}" lists {len(kinds)} layers')
    return kinds


def _block(fields: Fields, hidden: int, eps: float) -> dict[str, Any]:
    """Return the description of a shared block with the Mamba-2 mixer behind it."""
    biases, adapters = fields.flag("add_bias_linear", False), fields.flag("use_shared_attention_adapter", False)
    attention = _attention(fields, hidden)
    if adapters and attention["kv_heads"] != attention["num_heads"]:
        raise fields.fail("num_key_value_heads", "with adapters of attention it must be num_attention_heads")
    fields.require("use_shared_mlp_adapter", True, [True], "every layer has an adapter of the shared MLP")
    return {
        "type": "shared_block",
        "attention": attention,
        "mixer": _mamba2(fields, hidden, biases),
        "mlp_size": fields.optional_integer("intermediate_size", 4 * hidden),
        "activation": activation(fields, "hidden_act", "gelu"),
        "bias": biases,
        "adapter_rank": fields.integer("adapter_rank", 128),
        "attention_adapters": adapters,
        "norm_eps": eps,
    }


def _mamba2(fields: Fields, hidden: int, biases: bool) -> dict[str, Any]:
    inner, heads = int(fields.number("mamba_expand", 2) * hidden), fields.integer("n_mamba_heads", 8)
    if inner % heads:
        raise fields.fail("n_mamba_heads", f"it must divide mamba_expand * hidden_size ({inner})")
    fields.require("mamba_headdim", inner // heads, [inner // heads], "it follows from n_mamba_heads")
    return {
        "type": "mamba2",
        "inner_dim": inner,
        "head_dim": inner // heads,
        "state_dim": fields.integer("mamba_d_state", 64),
        "groups": fields.integer("mamba_ngroups", 1),
        "conv_width": fields.integer("mamba_d_conv", 4),
        "proj_bias": biases,
        "time_step_limit": [fields.number("time_step_min", 0.001), math.inf],
        "norm_eps": _GATED_NORM_EPS,
    }


def _attention(fields: Fields, hidden: int) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 32)
    if 2 * hidden % heads:
        raise fields.fail("num_attention_heads", f"it must divide 2 * hidden_size ({2 * hidden})")
    head_dim = 2 * hidden // heads
    fields.require("attention_hidden_size", 2 * hidden, [2 * hidden], "attention reads the stream and the embeddings")
    fields.require("attention_head_dim", head_dim, [head_dim], "it follows from num_attention_heads")
    no_dropout(fields, "attention_dropout")
    fields.require("use_long_context", False, [False], "it turns heads by other angles")
    turned = fields.flag("use_mem_rope", False)
    if not turned:
        fields.ignore("rope_parameters", "rope_theta", "rope_scaling")
    return {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.optional_integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        # Half of a head's channels are of the embeddings: scores are as large as without them.
        "scale": (head_dim / 2) ** -0.5,
        "input_size": 2 * hidden,
        **(rotation_fields(fields, plain_share=False) if turned else {"rotary_share": 0.0}),
    }


def _written_rope(kept: dict[str, Any], attention: Mapping[str, Any]) -> dict[str, Any]:
    if not attention.get("rotary_share", 1.0):
        return {"use_mem_rope": False}
    said = kept if kept.get("use_mem_rope") else {}
    return {"use_mem_rope": True, **written_rope(attention, said, plain_share=False)}


def _written_activation(kept: Any, name: str) -> str:
    return str(kept) if OTHER_NAMES.get(str(kept), kept) == name else name


def _shared(plain: PlainConfig) -> Sequence[dict[str, Any]]:
    found = (modules(layer)[0] for layer in plain.layers)
    return [module for module in found if module["type"] == "shared_block"]


def _block_sources(module: Mapping[str, Any], hidden: int, layer: str, theirs: str, use: int) -> dict[str, Source]:
    """Return the sources of a layer with a shared block: `theirs` is where the file has that, `use` counts its uses."""
    ours = f"{layer}mixer."
    sources = {
        f"{ours}out_proj.weight": same(f"{layer}linear.weight"),
        f"{ours}norm.weight": same(f"{layer}mamba_decoder.input_layernorm.weight"),
        **module_sources(module["mixer"], hidden, f"{ours}mixer.", f"{layer}mamba_decoder.mamba."),
    }
    lists = {"mlp_adapter": "feed_forward.gate_up_proj_adapter_list"}
    if module["attention_adapters"]:
        lists |= {f"{name}_adapter": f"self_attn.linear_{name}_adapter_list" for name in "qkv"}
    for name, other in lists.items():
        for half in range(2):
            sources[f"{ours}{name}.{half}.weight"] = same(f"{theirs}{other}.{use}.{half}.weight")
    if module.get("weights_of") is not None:
        return sources
    names = {"norm.weight": "input_layernorm.weight", "mlp_norm.weight": "pre_ff_layernorm.weight"}
    names |= {f"attention.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"}
    for kind in ("weight", *(["bias"] if module["bias"] else [])):
        names |= {f"{name}.{kind}": f"feed_forward.{name}.{kind}" for name in ("gate_up_proj", "down_proj")}
    return sources | {f"{ours}shared.{name}": same(f"{theirs}{other}") for name, other in names.items()}
