"""What the formats of hybrids share: Mamba-2 layers among attention, MLPs and experts, in transformers' spelling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.descriptions.base import CONV_ACTIVATIONS
from longrecall.layers.descriptions.mlp import ACTIVATIONS, OTHER_NAMES
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.rope import read_rope, rope_parameters
from longrecall.models.formats.sources import same, squeeze_conv
from longrecall.models.formats.stock import json_number
from longrecall.models.sizes import PlainConfig

RECURRENT, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
"""Kinds of layers, by transformers' names."""
_OLDER_KINDS = {"mamba": RECURRENT, "attention": ATTENTION}


@dataclass(frozen=True)
class Block:
    """One block of a layer in a foreign file.

    Attributes:
        module: its description.
        sources: what stands before its native names, and before those of the file's layer -> where its tensors are.
        norm: what the file calls the norm before it.
    """

    module: dict[str, Any]
    sources: Callable[[str, str], dict[str, Source]]
    norm: str


def decoder_layout(
    config: dict[str, Any], layers: Sequence[tuple[Block, Block]], *, final_norm: str, multiplier: float = 1.0
) -> Layout:
    """Build the layout of layers of a token mixer and a channel mixer, each after a norm.

    Args:
        config: the other keys of a native config.json.
        layers: both blocks of every layer.
        final_norm: what the file calls the norm before the head.
        multiplier: what the output of every block is multiplied by.
    """
    tied = config["tie_word_embeddings"]
    sources: dict[str, Source] = {
        "model.embeddings.weight": same("model.embed_tokens.weight"),
        "model.norm.weight": same(f"model.{final_norm}.weight"),
    }
    sources |= {} if tied else {"lm_head.weight": same("lm_head.weight")}
    described = []
    for index, both in enumerate(layers):
        place = f"model.layers.{index}."
        for name, block in zip(("mixer", "mlp"), both, strict=True):
            sources[f"{place}{name}_norm.weight"] = same(f"{place}{block.norm}.weight")
            sources |= block.sources(f"{place}{name}.", place)
        named = zip(("mixer", "mlp"), both, strict=True)
        blocks = [{"name": name, "module": block.module, "multiplier": multiplier} for name, block in named]
        described.append({"blocks": blocks})
    plain = PlainConfig.from_dict({**config, "layers": described})
    return Layout(plain, sources, copies={"lm_head.weight": "model.embeddings.weight"} if tied else {})


def layer_kinds(fields: Fields, name: str, given: Any, allowed: Sequence[str]) -> list[str]:
    """Return the kinds of all layers that the key `name` lists, older spellings as today's.

    Raises:
        UserError: no list of them, or more or fewer than num_hidden_layers says.
    """
    known = [*allowed, *(old for old, new in _OLDER_KINDS.items() if new in allowed)]
    if not isinstance(given, list) or not given or not all(isinstance(kind, str) and kind in known for kind in given):
        raise fields.fail(name, f"it must be a list of {', '.join(known)}")
    return [str(_OLDER_KINDS.get(kind, kind)) for kind in given]


def written_kinds(kept: Any, kinds: list[str]) -> Any:
    """Return the list of kinds as it was spelt, where it says the same."""
    said = [_OLDER_KINDS.get(kind, kind) for kind in kept] if isinstance(kept, list) else None
    return kept if said == kinds else kinds


def activation(fields: Fields, name: str, default: str) -> str:
    """Return the activation of an MLP; UserError names the key where there is no such function here."""
    known = [*ACTIVATIONS, *OTHER_NAMES]
    fields.require(name, default, known, "other activations are missing")
    value = str(fields.get(name, default))
    return OTHER_NAMES.get(value, value)


def conv_activation(fields: Fields, name: str, default: str = "silu") -> str:
    """Return the activation after a convolution; UserError names the key where there is no such function here."""
    known = [*CONV_ACTIVATIONS, *(other for other, own in OTHER_NAMES.items() if own in CONV_ACTIVATIONS)]
    fields.require(name, default, known, "other activations do not follow a convolution here")
    value = str(fields.get(name, default))
    return OTHER_NAMES.get(value, value)


def no_dropout(fields: Fields, *names: str) -> None:
    """Refuse dropout, which changes training alone: longrecall has none."""
    for name in names:
        fields.require(name, 0.0, [0.0, 0], "it trains without dropout")


def mamba2_fields(fields: Fields, hidden: int, norm_eps: float) -> dict[str, Any]:
    """Return the description of the Mamba-2 layers of Bamba, Granite 4 and Falcon-H1 (keys ``mamba_*``)."""
    inner = fields.integer("mamba_expand", 2) * hidden
    if fields.get("mamba_d_ssm") is not None:
        inner = fields.integer("mamba_d_ssm")
    heads = fields.integer("mamba_n_heads", 128)
    if fields.get("mamba_d_head", "auto") == "auto":
        if inner % heads:
            raise fields.fail("mamba_n_heads", f"it must divide the {inner} channels of a Mamba-2 layer")
        head_dim = inner // heads
    else:
        head_dim = fields.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise fields.fail("mamba_d_head", f"times mamba_n_heads ({heads}) it must be {inner}")
    fields.ignore("mamba_chunk_size")
    return {
        "type": "mamba2",
        "inner_dim": inner,
        "head_dim": head_dim,
        "state_dim": fields.integer("mamba_d_state", 256),
        "groups": fields.integer("mamba_n_groups", 1),
        "conv_width": fields.integer("mamba_d_conv", 4),
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "proj_bias": fields.flag("mamba_proj_bias", False),
        "time_step_limit": fields.limits("time_step_limit"),
        "norm_eps": norm_eps,
        "conv_activation": conv_activation(fields, "hidden_act"),
    }


def attention_fields(fields: Fields, hidden: int, *, heads: int = 32, kv_heads: int | None = None) -> dict[str, Any]:
    """Return the description of grouped attention without its rotation; `heads`, `kv_heads`: defaults of the config."""
    heads = fields.integer("num_attention_heads", heads)
    bias = fields.flag("attention_bias", False)
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.fail("num_attention_heads", f"it must divide hidden_size ({hidden})")
    head_dim = fields.optional_integer("head_dim", hidden // heads)
    # Only a key that is absent has the default; null stands for as many as there are heads.
    count = kv_heads if "num_key_value_heads" not in fields.raw else fields.optional_integer("num_key_value_heads")
    fields.ignore("num_key_value_heads")
    no_dropout(fields, "attention_dropout")
    return {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": heads if count is None else count,
        "head_dim": head_dim,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def written_attention(module: Mapping[str, Any], hidden: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config that say attention without its rotation; the inverse of `attention_fields`."""
    heads = module["num_heads"]
    # Most files do not say the width that is the usual one.
    usual = "head_dim" not in kept and heads * module["head_dim"] == hidden
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": module["kv_heads"],
        **({} if usual else {"head_dim": module["head_dim"]}),
        "attention_bias": module["qkv_bias"],
    }


def written_rope(module: Mapping[str, Any], kept: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """Return the keys of a config that say the rotation of an attention layer; none where `kept` says it already.

    `how`: what `read_rope` is called with in this format.
    """
    attention = AttentionConfig.from_dict({key: value for key, value in module.items() if key != "type"})
    if kept:
        said = {**module, **read_rope(Fields(dict(kept), "config.json"), **how)}
        if AttentionConfig.from_dict(said) == attention:
            return {}
    older = {name: None for name in ("rope_theta", "rope_scaling", "partial_rotary_factor") if name in kept}
    return {**older, "rope_parameters": rope_parameters(attention)}


def rotation_fields(fields: Fields, **how: Any) -> dict[str, Any]:
    """Return the rotation of an attention layer; UserError where there is none, which these models do not know.

    `how`: what `read_rope` is called with in this format.
    """
    rotation = read_rope(fields, **how)
    if not rotation["rotary_share"]:
        raise fields.fail("rope_parameters", '"rope_theta" must be a number: attention has rotary positions')
    return rotation


def module_sources(module: Mapping[str, Any], hidden: int, ours: str, theirs: str | Iterable[str]) -> dict[str, Source]:
    """Return where the tensors of a module come from whose names agree on both sides, but for the convolution.

    Args:
        module: its description.
        hidden: the model's width.
        ours: what stands before native names, with its dot.
        theirs: the same of the foreign file; of several spellings the first is the one to write.
    """
    prefixes = [theirs] if isinstance(theirs, str) else list(theirs)
    found: dict[str, Source] = {}
    for name in mixer_config(dict(module)).tensor_shapes(hidden):
        foreign = name.replace("conv.", "conv1d.")
        source = same(*(f"{prefix}{foreign}" for prefix in prefixes))
        found[f"{ours}{name}"] = squeeze_conv(source) if name == "conv.weight" else source
    return found


def find_module(plain: PlainConfig, kind: str) -> dict[str, Any] | None:
    """Return the first module of type `kind` in any layer, SwiGLU MLPs too; None where there is none."""
    every = (block.module for layer in plain.layer_configs() for block in layer.blocks)
    return next((module.to_dict() for module in every if module.type == kind), None)


def first_of(plain: PlainConfig, *kinds: str) -> dict[str, Any]:
    """Return the first module of one of these types in any layer; the others are compared when it is read back.

    Raises:
        UserError: there is none.
    """
    for kind in kinds:
        if (module := find_module(plain, kind)) is not None:
            return module
    raise UserError(f"no layer of this model has a module of type {' or '.join(kinds)}")


def written_mamba2(module: Mapping[str, Any], hidden: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys ``mamba_*`` of a config that say a Mamba-2 layer; the inverse of `mamba2_fields`."""
    low, high = module["time_step_limit"]
    heads = module["inner_dim"] // module["head_dim"]
    # "auto" stays, where it still says the same.
    auto = kept.get("mamba_d_head") == "auto" and kept.get("mamba_n_heads") == heads
    return {
        "mamba_n_heads": heads,
        **({} if auto else {"mamba_d_head": module["head_dim"]}),
        "mamba_d_state": module["state_dim"],
        "mamba_n_groups": module["groups"],
        "mamba_d_conv": module["conv_width"],
        "mamba_conv_bias": module["conv_bias"],
        "mamba_proj_bias": module["proj_bias"],
        "time_step_limit": [low, json_number(high)],
    }


def inverse_number(kept: Mapping[str, Any], key: str, value: float) -> float:
    """Return x with 1 / x == value, as it was written where that holds: a divisor that is natively a factor."""
    return _undone(kept.get(key), 1 / value, lambda x: 1 / x, value)


def times(kept: Mapping[str, Any], key: str, value: float, count: int) -> float:
    """Return x with x / count == value, as it was written where that holds."""
    return _undone(kept.get(key), value * count, lambda x: x / count, value)


def _undone(old: object, near: float, read: Callable[[float], float], value: float) -> float:
    """The first of a few numbers near `near` of which `read` makes `value`; the one that was written goes first."""
    said = [old] if isinstance(old, int | float) and not isinstance(old, bool) and (old or not value) else []
    others = [round(near, 12), near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)]
    return next((x for x in [*said, *others] if (x or not value) and read(x) == value), near)
