"""What the hybrids of Qwen share (Qwen3-Next, Qwen3.5): three layers of Gated DeltaNet, then one of gated attention.

Facts are from ``models/qwen3_next`` and ``models/qwen3_5`` of transformers 5.23. Every norm of the residual stream, and
those of queries and keys, scale by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.moe_common import balance_of, coefficient, expert_sources, mlp_sources
from longrecall.models.formats.rope import read_rope, written_rope
from longrecall.models.formats.sources import either, same, split, squeeze_conv
from longrecall.models.formats.stock import first_module, modules
from longrecall.models.sizes import PlainConfig

LINEAR, FULL = "linear_attention", "full_attention"
ROTARY_SHARE = 0.25
_ONE_PLUS = {"offset": 1.0}
_WIDTHS = {
    "linear_num_key_heads": ("num_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("conv_width", 4),
}
"""Key of the config -> field of a `gated_delta_net`, and what is meant where the key is missing."""


@dataclass(frozen=True)
class Defaults:
    """Values of keys that a config.json may leave out; they differ between the families."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    kv_heads: int


@dataclass(frozen=True)
class Body:
    """The part of a model that all these families have: everything but the MLPs or experts."""

    config: dict[str, Any]
    """The fields of the native config without its layers."""
    mixers: list[dict[str, Any]]
    """Of every layer."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.config["hidden_size"])

    def plain(self, mlps: Sequence[dict[str, Any]]) -> PlainConfig:
        """Return the native config with one channel mixer for every layer."""
        layers = [
            {
                "blocks": [
                    {"name": "mixer", "module": mixer, "norm": _ONE_PLUS},
                    {"name": "mlp", "module": mlp, "norm": _ONE_PLUS},
                ]
            }
            for mixer, mlp in zip(self.mixers, mlps, strict=True)
        ]
        return PlainConfig.from_dict({**self.config, "final_norm": _ONE_PLUS, "layers": layers})


def read_body(fields: Fields, defaults: Defaults) -> Body:
    """Read what the families share.

    Raises:
        UserError: a value that longrecall cannot reproduce; the message names it.
    """
    fields.require("hidden_act", "silu", ["silu"], "the activations are SiLU")
    fields.require("attn_output_gate", True, [True], "attention has an output gate")
    norm_eps = fields.number("rms_norm_eps", 1e-6)
    context = fields.integer("max_position_embeddings", 32768)
    bias = fields.flag("attention_bias", False)
    attention = {
        "type": "attention",
        "num_heads": fields.integer("num_attention_heads", 16),
        "kv_heads": fields.integer("num_key_value_heads", defaults.kv_heads),
        "head_dim": fields.integer("head_dim", 256),
        **read_rope(fields, share=ROTARY_SHARE),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "head",
        "qk_norm_offset": 1.0,
        "qk_norm_eps": norm_eps,
        "output_gate": True,
    }
    linear = {
        "type": "gated_delta_net",
        **{name: fields.integer(key, default) for key, (name, default) in _WIDTHS.items()},
        "norm_eps": norm_eps,
    }
    # Dropout is for training; the other says in which type servers keep the state, which here is always float32.
    fields.ignore("attention_dropout", "mamba_ssm_dtype")
    # How many parts predict several tokens: their tensors travel along.
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    kinds = read_layer_types(fields, fields.integer("num_hidden_layers", defaults.num_hidden_layers), _kinds)
    config = {
        "vocab_size": fields.integer("vocab_size", defaults.vocab_size),
        "hidden_size": fields.integer("hidden_size", defaults.hidden_size),
        "norm_eps": norm_eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": False,
        "context_length": context,
        **fields.token_ids(),
    }
    return Body(config, [linear if kind == LINEAR else attention for kind in kinds])


def _kinds(fields: Fields, count: int) -> list[str]:
    interval = fields.integer("full_attention_interval", 4)
    return [LINEAR if (index + 1) % interval else FULL for index in range(count)]


def read_layer_types(fields: Fields, count: int, otherwise: Any) -> list[str]:
    """Return the kind of every layer: what `layer_types` says, or `otherwise(fields, count)` where it is not there."""
    # What `layer_types` was made of, when it is there.
    fields.ignore("full_attention_interval")
    kinds = fields.get("layer_types")
    if kinds is None:
        return list(otherwise(fields, count))
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {LINEAR, FULL}:
        raise fields.fail("layer_types", f'it must be a list of {count} words, "{LINEAR}" or "{FULL}"')
    return kinds


def layer_types(plain: PlainConfig) -> list[str]:
    """Return the kind of every layer as a config.json has it."""
    kinds = [modules(layer)[0].get("type") for layer in plain.layers]
    return [FULL if kind == "attention" else LINEAR for kind in kinds]


def first_attention(plain: PlainConfig) -> dict[str, Any] | None:
    """Return the description of the first attention layer; None where there is none."""
    found = (module for layer in plain.layers for module in modules(layer)[:1] if module["type"] == "attention")
    return next(found, None)


def body_fields(plain: PlainConfig, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that `read_body` reads, but for those that all formats share.

    Raises:
        UserError: the model has no Gated DeltaNet.
    """
    linear, attention = first_module(plain, "gated_delta_net"), first_attention(plain)
    fields = {key: linear[name] for key, (name, _) in _WIDTHS.items()}
    fields |= {"layer_types": layer_types(plain), "rms_norm_eps": plain.norm_eps}
    if attention is not None:
        fields |= {
            "num_attention_heads": attention["num_heads"],
            "num_key_value_heads": attention["kv_heads"],
            "head_dim": attention["head_dim"],
            "attention_bias": attention["qkv_bias"],
            **written_rope(attention, kept, share=ROTARY_SHARE),
        }
    return fields


def text_layout(
    body: Body,
    mlps: Sequence[dict[str, Any]],
    delta: Callable[[Mapping[str, Any]], dict[str, Source]],
    places: Sequence[str],
    travelling: tuple[str, ...],
) -> Layout:
    """Build the layout of a text model.

    Args:
        body, mlps: what it consists of.
        delta: the sources of a Gated DeltaNet, names relative to it.
        places: what may stand before the names in a file; the first is the one to write.
        travelling: as in `Layout`.
    """
    tied = body.config["tie_word_embeddings"]
    sources = {
        "model.embeddings.weight": _at(places, same("embed_tokens.weight")),
        "model.norm.weight": _at(places, same("norm.weight")),
        **({} if tied else {"lm_head.weight": same("lm_head.weight")}),
    }
    # A file of a few bytes may promise thousands of layers: equal ones are described once.
    known: dict[tuple[int, int], dict[str, Source]] = {}
    for index, (mixer, mlp) in enumerate(zip(body.mixers, mlps, strict=True)):
        if (id(mixer), id(mlp)) not in known:
            known[id(mixer), id(mlp)] = _layer_sources(mixer, mlp, delta)
        for name, source in known[id(mixer), id(mlp)].items():
            sources[f"model.layers.{index}.{name}"] = _at([f"{place}layers.{index}." for place in places], source)
    copies = {"lm_head.weight": "model.embeddings.weight"} if tied else {}
    return Layout(body.plain(mlps), sources, copies, travelling=travelling)


def _at(places: Sequence[str], source: Source) -> Source:
    return either(*(source.under(place) for place in places))


def _layer_sources(
    mixer: dict[str, Any], mlp: dict[str, Any], delta: Callable[[Mapping[str, Any]], dict[str, Source]]
) -> dict[str, Source]:
    """Return the sources of one layer: names relative to it on both sides."""
    sources = {
        "mixer_norm.weight": same("input_layernorm.weight"),
        "mlp_norm.weight": same("post_attention_layernorm.weight"),
    }
    if mixer["type"] == "attention":
        names = [f"{name}_proj.weight" for name in "qkvo"] + ["q_norm.weight", "k_norm.weight"]
        names += [f"{name}_proj.bias" for name in "qkvo"] if mixer["qkv_bias"] else []
        sources |= {f"mixer.{name}": same(f"self_attn.{name}") for name in names}
    else:
        sources |= {f"mixer.{name}": source.under("linear_attn.") for name, source in delta(mixer).items()}
    found = mlp_sources("", "") if mlp["type"] == "mlp" else _moe_sources(mlp)
    return sources | {f"mlp.{name}": source.under("mlp.") for name, source in found.items()}


def delta_sources(mixer: Mapping[str, Any]) -> dict[str, Source]:
    """Return the sources of a Gated DeltaNet but for its projections of x: names relative to the mixer."""
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}
    convolutions = split("conv1d.weight", channels(mixer))
    return {ours: same(theirs) for ours, theirs in names.items()} | {
        f"{name}_conv.weight": squeeze_conv(part) for name, part in zip("qkv", convolutions, strict=True)
    }


def channels(mixer: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the channels of all queries, keys and values of a Gated DeltaNet."""
    keys = mixer["num_heads"] * mixer["key_dim"]
    return keys, keys, mixer["value_heads"] * mixer["value_dim"]


def _moe_sources(mlp: Mapping[str, Any]) -> dict[str, Source]:
    """Return the sources of a mixture of experts, names relative to it."""
    sources = {"router.weight": same("gate.weight"), "shared_gate.weight": same("shared_expert_gate.weight")}
    sources |= mlp_sources("shared.", "shared_expert.")
    return sources | expert_sources("", "", mlp["num_experts"], mlp["inner_size"])


def read_experts(fields: Fields, defaults: Mapping[str, int], layers: int, *, normalise: bool) -> dict[str, Any]:
    """Read a mixture of experts as a description; `layers`: how many layers have one."""
    # Whether the balance loss is formed at all; longrecall forms it while training.
    fields.ignore("output_router_logits")
    return {
        "type": "moe",
        "num_experts": fields.integer("num_experts", defaults["num_experts"]),
        "top_k": fields.integer("num_experts_per_tok", defaults["num_experts_per_tok"]),
        "inner_size": fields.integer("moe_intermediate_size", 512),
        "normalise": normalise,
        "balance": balance_of(fields, layers),
        "shared_size": fields.integer("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }


def expert_fields(plain: PlainConfig, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that `read_experts` reads.

    Raises:
        UserError: the model has no experts.
    """
    mlp = first_module(plain, "moe")
    layers = sum(any(module["type"] == "moe" for module in modules(layer)) for layer in plain.layers)
    if not mlp.get("shared_size"):
        raise UserError("a layer has no shared expert, and the other model always has one")
    return {
        "num_experts": mlp["num_experts"],
        "num_experts_per_tok": mlp["top_k"],
        "moe_intermediate_size": mlp["inner_size"],
        "shared_expert_intermediate_size": mlp["shared_size"],
        "router_aux_loss_coef": coefficient(kept, mlp["balance"], layers),
    }
