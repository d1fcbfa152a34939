"""Hymba as published (``model_type: hymba``, nvidia/Hymba-1.5B): the code that comes with its checkpoints.

Every layer has attention and a Mamba scan side by side, fed by one projection, each normed, and projected together.
Learnt tokens stand before every text and are seen from everywhere; groups of layers share the keys and values of their
first one.
"""

from __future__ import annotations

import math
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same, split, squeeze_conv
from longrecall.models.formats.stock import common_fields, expansion, first_module, merged
from longrecall.models.sizes import PlainConfig, mixer_of

_STRETCH = 2
"""The factor of the code's "ntk" angles; no key says it."""
_PLAIN, _NTK = "default", "ntk"


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a HymbaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, count = fields.integer("hidden_size", 4096), fields.integer("num_hidden_layers", 32)
    eps, memory = fields.number("rms_norm_eps", 1e-6), fields.integer("num_memory_tokens", 0, least=0)
    fields.require("memory_tokens_interspersed_every", 0, [0], "memory tokens stand before the text alone")
    attention, ssm = _attention(fields, hidden), _ssm(fields, hidden, eps)
    if attention["num_heads"] * attention["value_dim"] != ssm["inner_dim"]:
        raise fields.fail("mamba_expand", "both branches have to be as wide, a multiple of num_attention_heads")
    mlp, groups, windows = _mlp(fields), _sharing(fields, count), _windows(fields, count)
    if any(windows[index] != windows[group[0]] for group in groups for index in group):
        raise fields.fail("kv_reuse_group", "layers that share keys have to see as far as each other")
    givers, takers = {group[0] for group in groups}, {index for group in groups for index in group[1:]}
    if memory and any(windows):
        # Elsewhere memory tokens fall out of the window.
        fields.require("attn_implementation_new", "flex", ["flex"], "memory tokens are seen from everywhere")
    tied = fields.flag("tie_word_embeddings", False)
    # Speed, caches, training; what the code computes again from other keys.
    fields.ignore(
        "attn_implementation", "attn_implementation_new", "use_mamba_kernels", "calc_logits_for_entire_prompt"
    )
    fields.ignore("output_router_logits", "router_aux_loss_coef", "attention_dropout", "num_experts_per_tok")
    fields.ignore("conv_dim", "seq_length", "v_head_dim")
    fields.require("layer_type", ["h"] * count, [["h"] * count], "all layers have both branches")
    config = {
        "vocab_size": fields.integer("vocab_size", 65536),
        "hidden_size": hidden,
        "norm_eps": eps,
        "tie_word_embeddings": tied,
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings"),
        "memory_tokens": memory,
        **fields.token_ids(),
    }
    fields.finish()
    layers, sources = [], dict[str, Source]()
    for index in range(count):
        shared = "take" if index in takers else "give" if index in givers else None
        own = {**attention, "window": windows[index]}
        own |= {"memory_tokens": memory} if memory else {}
        own |= {"shared_keys": shared} if shared else {}
        mixer = {"type": "hymba", "attention": own, "ssm": ssm, "norm_eps": eps}
        blocks = [{"name": "mixer", "module": mixer}, *([{"name": "mlp", "module": mlp}] if mlp else [])]
        layers.append({"blocks": blocks})
        sources |= _layer_sources(index, mixer, mlp)
    sources |= {"model.embeddings.weight": same("model.embed_tokens.weight")}
    sources |= {"model.norm.weight": same("model.final_layernorm.weight")}
    sources |= {"model.memory_tokens": same("model.memory_tokens")} if memory else {}
    sources |= {} if tied else {"lm_head.weight": same("lm_head.weight")}
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": layers}),
        sources=sources,
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        ignored_suffixes=("rotary_emb.inv_freq",),
    )


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the HymbaConfig of a native model as plain data; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "hymba")
    attention, ssm = mixer["attention"], mixer["ssm"]
    found = [mixer_of(layer).get("attention", {}) for layer in plain.layers]
    mlp = next((block.module.to_dict() for layer in plain.layer_configs() for block in layer.blocks[1:]), None)
    windows = [one.get("window") for one in found]
    groups = _groups([one.get("shared_keys") for one in found])
    said = bool(kept) and _sharing(Fields(kept, ""), len(found)) == groups
    return merged(
        kept,
        {
            "model_type": "hymba",
            "architectures": ["HymbaForCausalLM"],
            **common_fields(plain),
            "rms_norm_eps": plain.norm_eps,
            "intermediate_size": 0 if mlp is None else mlp["inner_size"],
            "mlp_hidden_act": "relu2" if mlp is not None and not mlp.get("gated", True) else "silu",
            "num_attention_heads": attention["num_heads"],
            "num_key_value_heads": attention["kv_heads"],
            "num_memory_tokens": plain.memory_tokens,
            "num_experts": 1,
            "mamba_expand": expansion(kept, "mamba_expand", ssm["inner_dim"], plain.hidden_size),
            "mamba_d_state": ssm["state_dim"],
            "mamba_d_conv": ssm["conv_width"],
            "mamba_conv_bias": ssm["conv_bias"],
            "mamba_inner_layernorms": ssm.get("input_norms", "none") == "weighted",
            **_written_rank(ssm["dt_rank"], plain.hidden_size, kept),
            **_written_windows(windows, kept),
            **({} if said else {"kv_reuse_group": groups or None, "kv_reuse_every_i_layer": -1}),
            **_written_rope(attention, plain, kept),
        },
    )


def _attention(fields: Fields, hidden: int) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 32)
    if hidden % heads:
        raise fields.fail("num_attention_heads", f"it must divide hidden_size ({hidden})")
    width, expand = hidden // heads, fields.number("mamba_expand", 2.0)
    for name, usual in (("attn_hidden_size", hidden), ("kq_head_dim", width)):
        fields.require(name, -1, [-1, None, usual], "queries are as wide as the model together")
    fields.require("kq_norm", None, [None, "none"], "queries and keys are not normed")
    return {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.optional_integer("num_key_value_heads", heads),
        "head_dim": width,
        "value_dim": round(expand * hidden) // heads,
        "out_proj": False,
        **_rope(fields, width),
    }


def _ssm(fields: Fields, hidden: int, eps: float) -> dict[str, Any]:
    fields.require("num_mamba", 1, [1], "there is one scan in a layer")
    fields.require("mamba_proj_bias", False, [False], "the projections have no bias")
    fields.require("hidden_act", "silu", ["silu", "swish"], "the convolution is followed by a SiLU")
    inner = fields.flag("mamba_inner_layernorms", True)
    return {
        "type": "mamba",
        "inner_dim": round(fields.number("mamba_expand", 2.0) * hidden),
        "state_dim": fields.integer("mamba_d_state", 16),
        "dt_rank": _rank(fields, hidden),
        "conv_width": fields.integer("mamba_d_conv", 4),
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "out_proj": False,
        **({"input_norms": "weighted", "norm_eps": eps} if inner else {}),
    }


def _rank(fields: Fields, hidden: int) -> int:
    if fields.get("mamba_dt_rank", "auto") == "auto":
        return math.ceil(hidden / 16)
    return fields.integer("mamba_dt_rank")


def _written_rank(rank: int, hidden: int, kept: dict[str, Any]) -> dict[str, Any]:
    return {} if kept and _rank(Fields(kept, ""), hidden) == rank else {"mamba_dt_rank": rank}


def _mlp(fields: Fields) -> dict[str, Any] | None:
    fields.require("num_experts", 1, [1], "its code builds one MLP a layer, whatever else is said")
    fields.require("mlp_hidden_act", "silu", ["silu", "relu2"], "its MLP has no other activation")
    inner = fields.integer("intermediate_size", 14336, least=0)
    if not inner:
        return None
    gated = fields.get("mlp_hidden_act", "silu") == "silu"
    return {"type": "mlp", "inner_size": inner} | ({} if gated else {"gated": False, "activation": "relu2"})


def _rope(fields: Fields, width: int) -> dict[str, Any]:
    """The angles: "ntk" is a larger base, the same for every length."""
    theta, kind = fields.number("rope_theta", 10000.0), fields.get("rope_type")
    most, original = fields.optional_integer("max_position_embeddings"), None
    if not fields.flag("rope", False):
        fields.ignore("rope_type", "orig_max_position_embeddings")
        return {"rotary_share": 0.0}
    fields.require("rope_type", None, [None, _PLAIN, _NTK], "other angles depend on the length")
    original = fields.optional_integer("orig_max_position_embeddings")
    if kind != _NTK:
        return {"rope_theta": theta}
    if original is None or most is None or width < 4:
        raise fields.fail("orig_max_position_embeddings", 'rope_type "ntk" needs it and max_position_embeddings')
    stretch = _STRETCH * most / original - (_STRETCH - 1)
    if stretch <= 0:
        raise fields.fail("orig_max_position_embeddings", "it is too long for max_position_embeddings")
    return {"rope_theta": theta * stretch ** (width / (width - 2))}


def _written_rope(attention: dict[str, Any], plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    turned = bool(attention.get("rotary_share", 1.0))
    wanted = {"rope_theta": attention["rope_theta"]} if turned else {"rotary_share": 0.0}
    if (
        kept
        and _rope(Fields({**kept, "max_position_embeddings": plain.context_length}, ""), attention["head_dim"])
        == wanted
    ):
        return {}
    return {"rope": turned, "rope_type": _PLAIN if turned else None, "rope_theta": attention["rope_theta"]}


def _windows(fields: Fields, count: int) -> list[int | None]:
    """Tokens that a layer's attention sees: its mask lets a token see `sliding_window` others."""
    window, everywhere = fields.optional_integer("sliding_window"), fields.get("global_attn_idx")
    if everywhere is not None and not (
        isinstance(everywhere, list) and all(isinstance(i, int) and 0 <= i < count for i in everywhere)
    ):
        raise fields.fail("global_attn_idx", f"it must be null or a list of layers below {count}")
    # The code's masks have a window only where this list is given.
    if window is None or everywhere is None:
        return [None] * count
    return [None if index in everywhere else window + 1 for index in range(count)]


def _written_windows(windows: list[int | None], kept: dict[str, Any]) -> dict[str, Any]:
    if kept and _windows(Fields(kept, ""), len(windows)) == windows:
        return {}
    window = next((size for size in windows if size is not None), None)
    if window is None:
        return {"sliding_window": None, "global_attn_idx": None}
    return {"sliding_window": window - 1, "global_attn_idx": [i for i, size in enumerate(windows) if size is None]}


def _sharing(fields: Fields, count: int) -> list[list[int]]:
    """Groups of layers that share the keys and values of their first one."""
    fields.require("kv_weight_reuse", False, [False], "layers share keys and values, not the weights of them")
    groups, every = fields.get("kv_reuse_group"), fields.get("kv_reuse_every_i_layer", -1)
    if isinstance(every, bool) or not isinstance(every, int):
        raise fields.fail("kv_reuse_every_i_layer", "it must be a whole number, -1 for none")
    if groups is None:
        whole = [] if every <= 0 else [list(range(i, min(i + every, count))) for i in range(0, count, every)]
        return [group for group in whole if len(group) > 1]
    fine = isinstance(groups, list) and all(
        isinstance(group, list) and len(group) > 1 and group == list(range(group[0], group[-1] + 1))
        for group in groups
        if isinstance(group, list) and all(isinstance(index, int) and 0 <= index < count for index in group)
    )
    flat = [index for group in groups for index in group] if fine else []
    if not fine or len(set(flat)) < len(flat):
        raise fields.fail("kv_reuse_group", "it must be a list of groups of neighbouring layers, each layer in one")
    return [list(group) for group in groups]


def _groups(shared: list[str | None]) -> list[list[int]]:
    """The groups that layers with these values of `shared_keys` make."""
    found: list[list[int]] = []
    for index, how in enumerate(shared):
        if how == "give":
            found.append([index])
        elif how == "take" and found:
            found[-1].append(index)
    return found


def _layer_sources(index: int, mixer: dict[str, Any], mlp: dict[str, Any] | None) -> dict[str, Source]:
    ours, theirs = f"model.layers.{index}.", f"model.layers.{index}."
    attention, ssm = mixer["attention"], mixer["ssm"]
    queries, inner = attention["num_heads"] * attention["head_dim"], ssm["inner_dim"]
    keys = attention["kv_heads"] * attention["head_dim"]
    values = attention["kv_heads"] * attention["value_dim"]
    block = f"{theirs}mamba."
    takes = attention.get("shared_keys") == "take"
    rows = {"attention.q_proj": queries}
    rows |= {} if takes else {"attention.k_proj": keys, "attention.v_proj": values}
    rows["ssm.in_proj"] = 2 * inner
    names = {
        "attention_norm.weight": "pre_avg_layernorm1.weight",
        "ssm_norm.weight": "pre_avg_layernorm2.weight",
        "out_proj.weight": "out_proj.weight",
        "ssm.A_log": "A_log.0",
        "ssm.D": "D.0",
        "ssm.x_proj.weight": "x_proj.0.weight",
        "ssm.dt_proj.weight": "dt_proj.0.weight",
        "ssm.dt_proj.bias": "dt_proj.0.bias",
    }
    if ssm["conv_bias"]:
        names["ssm.conv.bias"] = "conv1d.bias"
    if ssm.get("input_norms") == "weighted":
        names |= {f"ssm.{name.lower()}_norm.weight": f"{name}_layernorm.weight" for name in ("dt", "B", "C")}
    found = {f"{ours}mixer.{name}": same(f"{block}{foreign}") for name, foreign in names.items()}
    for name, part in zip(rows, split(f"{block}in_proj.weight", tuple(rows.values())), strict=True):
        found[f"{ours}mixer.{name}.weight"] = part
    found[f"{ours}mixer.ssm.conv.weight"] = squeeze_conv(same(f"{block}conv1d.weight"))
    found[f"{ours}mixer_norm.weight"] = same(f"{theirs}input_layernorm.weight")
    if mlp is not None:
        found[f"{ours}mlp_norm.weight"] = same(f"{theirs}pre_moe_layernorm.weight")
        for name in ("gate_proj", "up_proj", "down_proj") if mlp.get("gated", True) else ("up_proj", "down_proj"):
            found[f"{ours}mlp.{name}.weight"] = same(f"{theirs}moe.experts.0.{name}.weight")
    return found
