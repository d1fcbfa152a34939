"""Kimi-Linear (``model_type: kimi_linear``): ``models/kimi_linear`` of transformers 5.23, and the published form.

Kimi Delta Attention, multi-head latent attention without positions in every few layers, an MLP in the first layers and
experts in the others. transformers renames tensors of published files as it loads them, and back as it saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import no_dropout
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.moe_common import expert_sources, mlp_sources
from longrecall.models.formats.sources import either, reshaped, same, split, squeeze_conv
from longrecall.models.formats.stock import common_fields, first_module, merged, modules
from longrecall.models.sizes import PlainConfig

_LATENT_EPS = 1e-6
"""Of the norms of latents, which no config changes."""
_PUBLISHED = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}
"""Names of the class -> names in files, which count where both are there."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a KimiLinearConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    names = {name: published if published in raw else name for name, published in _PUBLISHED.items()}
    fields = Fields({key: value for key, value in raw.items() if names.get(key, key) == key}, where)
    fields.require("num_nextn_predict_layers", 0, [0, None], "it predicts one token")
    fields.require("tie_word_embeddings", False, [False], "the head is a matrix of its own")
    layers, eps = fields.integer("num_hidden_layers", 27), fields.number("rms_norm_eps", 1e-5)
    linear = fields.section("linear_attn_config")
    kinds = {
        "full_attention": _attention(fields),
        "linear_attention": _delta_attention(fields, linear, eps),
        "dense": {"type": "mlp", "inner_size": fields.integer("intermediate_size", 9216)},
        "sparse": _experts(fields, names),
    }
    pairs = list(zip(_mixer_kinds(fields, linear, layers), _mlp_kinds(fields, layers), strict=True))
    linear.finish()
    no_dropout(fields, "attention_dropout")
    # Attention has no positions; the others are of training, of speed, or not read by any code.
    fields.ignore("rope_theta", "rope_scaling", "head_dim", "output_router_logits")
    fields.ignore("pretraining_tp", "use_grouped_topk", "qk_head_dim")
    config = {
        "vocab_size": fields.integer("vocab_size", 163840),
        "hidden_size": fields.integer("hidden_size", 2304),
        "norm_eps": eps,
        "tie_word_embeddings": False,
        "residual_in_fp32": False,
        "context_length": fields.optional_integer(names["max_position_embeddings"], 1048576),
        **fields.token_ids(),
    }
    fields.finish()
    sources = {
        "model.embeddings.weight": same("model.embed_tokens.weight"),
        "model.norm.weight": same("model.norm.weight"),
        "lm_head.weight": same("lm_head.weight"),
    }
    described = []
    for index, (mixer, mlp) in enumerate(pairs):
        modules_of = {"mixer": kinds[mixer], "mlp": kinds[mlp]}
        described.append({"blocks": [{"name": name, "module": module} for name, module in modules_of.items()]})
        sources |= _layer_sources(f"model.layers.{index}.", **modules_of)
    return Layout(PlainConfig.from_dict({**config, "layers": described}), sources)


def _attention(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 32)
    fields.require("num_key_value_heads", heads, [heads, None], "every head has keys of its own")
    fields.require("mla_use_nope", True, [True], "attention has no positions")
    return {
        "type": "mla",
        "num_heads": heads,
        "kv_rank": fields.integer("kv_lora_rank", 512),
        "nope_dim": fields.integer("qk_nope_head_dim", 128),
        "rope_dim": fields.integer("qk_rope_head_dim", 64, least=0),
        "value_dim": fields.integer("v_head_dim", 128),
        "q_rank": fields.optional_integer("q_lora_rank"),
        "rotary": False,
        "bias": fields.flag("attention_bias", False),
        "norm_eps": _LATENT_EPS,
    }


def _delta_attention(fields: Fields, linear: Fields, eps: float) -> dict[str, Any]:
    """Return the description of KDA: what the section `linear` says counts, where there is one."""
    width = linear.integer("head_dim", fields.integer("linear_head_dim", 128))
    return {
        "type": "kda",
        "num_heads": linear.integer("num_heads", fields.integer("linear_num_heads", 32)),
        "key_dim": width,
        "value_dim": width,
        "gate_rank": width,
        "conv_width": linear.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4)),
        "norm_eps": eps,
        "gate_bias": False,
    }


def _experts(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of the experts; `names`: how the file spells keys that have two names."""
    fields.require("hidden_act", "silu", ["silu", "swish"], "the activation is a SiLU")
    fields.require("moe_router_activation_func", "sigmoid", ["sigmoid"], "the router's scores are sigmoids")
    fields.require("moe_layer_freq", 1, [1], "every layer after the first ones has experts")
    inner, groups = fields.integer("moe_intermediate_size", 1024), fields.integer(names["n_group"], 1)
    if groups > 1:
        fields.require("use_grouped_topk", True, [True], "experts are chosen within groups")
    return {
        "type": "moe",
        "num_experts": fields.integer(names["num_local_experts"], 256),
        "top_k": fields.integer(names["num_experts_per_tok"], 8),
        "inner_size": inner,
        "router": "sigmoid",
        "normalise": fields.flag(names["norm_topk_prob"], True),
        "balance": 0.0,
        "correction_bias": True,
        "groups": groups,
        "active_groups": fields.optional_integer("topk_group", 1),
        "scale": fields.number("routed_scaling_factor", 2.446),
        "router_in_fp32": True,
        "shared_size": inner * fields.integer(names["n_shared_experts"], 1),
    }


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the KimiLinearConfig of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: a kind of layer is missing by which sizes of the config are told.
    """
    kda, mla, moe = (first_module(plain, kind) for kind in ("kda", "mla", "moe"))
    kinds = [modules(layer) for layer in plain.layers]
    mixers = ["full_attention" if pair[0]["type"] == "mla" else "linear_attention" for pair in kinds]
    mlps = ["dense" if pair[-1]["type"] == "mlp" else "sparse" for pair in kinds]
    named = {
        "num_local_experts": moe["num_experts"],
        "num_experts_per_tok": moe["top_k"],
        "n_shared_experts": moe.get("shared_size", 0) // moe["inner_size"],
        "n_group": moe.get("groups", 1),
        "norm_topk_prob": moe["normalise"],
        "max_position_embeddings": plain.context_length,
    }
    own = {name if name in kept and published not in kept else published for name, published in _PUBLISHED.items()}
    values = {name if name in own else _PUBLISHED[name]: value for name, value in named.items()}
    dense = [pair[-1]["inner_size"] for pair in kinds if pair[-1]["type"] == "mlp"]
    fields = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **common_fields(plain, context=None),
        **values,
        "rms_norm_eps": plain.norm_eps,
        "num_attention_heads": mla["num_heads"],
        "num_key_value_heads": mla["num_heads"] if kept.get("num_key_value_heads", 0) is not None else None,
        "kv_lora_rank": mla["kv_rank"],
        "q_lora_rank": mla["q_rank"],
        "qk_nope_head_dim": mla["nope_dim"],
        "qk_rope_head_dim": mla["rope_dim"],
        "v_head_dim": mla["value_dim"],
        "attention_bias": mla["bias"],
        "moe_intermediate_size": moe["inner_size"],
        "topk_group": moe.get("active_groups", 1),
        "routed_scaling_factor": moe.get("scale", 1.0),
        **({"intermediate_size": dense[0]} if dense else {}),
        **_layer_fields(kept, kda, mixers, mlps),
    }
    return merged(kept, fields)


def _layer_fields(kept: dict[str, Any], kda: dict[str, Any], mixers: list[str], mlps: list[str]) -> dict[str, Any]:
    """Return what says the kinds of layers and the sizes of KDA: as in the file, or else as in published ones."""
    fields: dict[str, Any] = {}
    sizes = {"head_dim": kda["key_dim"], "num_heads": kda["num_heads"], "short_conv_kernel_size": kda["conv_width"]}
    if "linear_attn_config" in kept or "layer_types" not in kept:
        places = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
        numbers = {key: [n for n, has in enumerate(mixers, 1) if has == kind] for key, kind in places.items()}
        fields["linear_attn_config"] = merged(kept.get("linear_attn_config", {}), {**numbers, **sizes})
    for name, key in (
        ("head_dim", "head_dim"),
        ("num_heads", "num_heads"),
        ("conv_kernel_dim", "short_conv_kernel_size"),
    ):
        if f"linear_{name}" in kept or "linear_attn_config" not in fields:
            fields[f"linear_{name}"] = sizes[key]
    if "layer_types" in kept:
        fields["layer_types"] = mixers
    first = mlps.index("sparse")
    if "mlp_layer_types" in kept or "dense" in mlps[first:]:
        fields["mlp_layer_types"] = mlps
    else:
        fields["first_k_dense_replace"] = first
    return fields


def _mixer_kinds(fields: Fields, linear: Fields, layers: int) -> list[str]:
    """Return "full_attention" or "linear_attention" for every layer."""
    full, recurrent = linear.get("full_attn_layers"), linear.get("kda_layers")
    given = _listed(fields, "layer_types", ("full_attention", "linear_attention"), layers)
    if given is not None:
        return given
    if full is None or recurrent is None:
        return ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(layers)]
    # Numbers of layers count from 1 there.
    kinds = {1: "full_attention", 0: "linear_attention"}
    both = [full, recurrent]
    if not all(isinstance(numbers, list) for numbers in both) or sorted(full + recurrent) != list(range(1, layers + 1)):
        raise linear.fail("full_attn_layers", f'with "kda_layers" it must name every layer from 1 to {layers} once')
    return [kinds[index in full] for index in range(1, layers + 1)]


def _mlp_kinds(fields: Fields, layers: int) -> list[str]:
    """Return "dense" or "sparse" for every layer."""
    first = fields.integer("first_k_dense_replace", 1, least=0)
    given = _listed(fields, "mlp_layer_types", ("dense", "sparse"), layers)
    return given if given is not None else ["dense" if index < first else "sparse" for index in range(layers)]


def _listed(fields: Fields, name: str, kinds: tuple[str, str], layers: int) -> list[str] | None:
    given = fields.get(name)
    if given is not None and not (
        isinstance(given, list) and len(given) == layers and all(kind in kinds for kind in given)
    ):
        raise fields.fail(name, f"it must be {layers} times {' or '.join(kinds)}")
    return given


def _layer_sources(layer: str, mixer: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Source]:
    sources = {
        f"{layer}mixer_norm.weight": same(f"{layer}input_layernorm.weight"),
        f"{layer}mlp_norm.weight": same(f"{layer}post_attention_layernorm.weight"),
    }
    read = _mla_sources if mixer["type"] == "mla" else _kda_sources
    sources |= read(f"{layer}mixer.", f"{layer}self_attn.", mixer)
    ours, theirs, renamed = f"{layer}mlp.", f"{layer}block_sparse_moe.", f"{layer}mlp."
    if mlp["type"] == "mlp":
        # transformers, saving, renames these too, which published files do not.
        return sources | mlp_sources(ours, renamed, theirs)
    bias = "gate.e_score_correction_bias"
    sources[f"{ours}correction_bias"] = same(f"{theirs}{bias}", f"{renamed}{bias}")
    sources[f"{ours}router.weight"] = same(f"{theirs}gate.weight", f"{renamed}gate.weight")
    sources |= mlp_sources(f"{ours}shared.", f"{theirs}shared_experts.", f"{renamed}shared_experts.")
    names = ("w1", "w3", "w2")
    return sources | expert_sources(ours, theirs, mlp["num_experts"], mlp["inner_size"], names, renamed)


def _mla_sources(ours: str, theirs: str, mixer: dict[str, Any]) -> dict[str, Source]:
    names = {"kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b_proj": "kv_b_proj"}
    if mixer["q_rank"] is None:
        names["q_proj"] = "q_proj"
    else:
        names |= {"q_a_proj": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b_proj": "q_b_proj"}
    names["o_proj"] = "o_proj"
    sources = {f"{ours}{name}.weight": same(f"{theirs}{other}.weight") for name, other in names.items()}
    if mixer["bias"]:
        biased = [name for name in ("q_a_proj", "kv_a_proj", "o_proj") if name in names]
        sources |= {f"{ours}{name}.bias": same(f"{theirs}{names[name]}.bias") for name in biased}
    return sources


def _kda_sources(ours: str, theirs: str, mixer: dict[str, Any]) -> dict[str, Source]:
    heads, channels = mixer["num_heads"], mixer["num_heads"] * mixer["key_dim"]
    gate = f"{theirs}forget_gate."
    rates = either(*(reshaped(same(f"{place}A_log"), (1, 1, heads, 1)) for place in (theirs, gate)))
    sources = {
        f"{ours}A_log": rates,
        f"{ours}dt_bias": same(f"{theirs}dt_bias", f"{gate}dt_bias"),
        f"{ours}o_norm.weight": same(f"{theirs}o_norm.weight"),
        **{f"{ours}{name}_proj.weight": same(f"{theirs}{name}_proj.weight") for name in "qkvbo"},
    }
    for index, half in enumerate("ab"):
        name = f"f_{half}_proj.weight"
        sources[f"{ours}f_proj.{index}.weight"] = same(f"{theirs}{name}", f"{gate}{name}")
        sources[f"{ours}g_proj.{index}.weight"] = same(f"{theirs}g_{half}_proj.weight")
    for name, part in zip("qkv", split(f"{theirs}conv1d.weight", (channels,) * 3), strict=True):
        alone = same(f"{theirs}{name}_conv1d.weight")
        sources[f"{ours}{name}_conv.weight"] = squeeze_conv(either(alone, part))
    return sources
