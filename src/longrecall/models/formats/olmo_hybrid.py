"""transformers' OLMo Hybrid (``model_type: olmo_hybrid``): ``models/olmo_hybrid`` of transformers 5.23.

Layers of Gated DeltaNet norm what a block reads, layers of attention what it returns. Published files turn no queries
and keys (a "rope_theta" of null).
"""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.moe_common import mlp_sources
from longrecall.models.formats.qwen_common import (
    FULL,
    LINEAR,
    channels,
    first_attention,
    layer_types,
    read_layer_types,
)
from longrecall.models.formats.rope import read_rope, written_rope
from longrecall.models.formats.sources import either, join, same, split, squeeze_conv
from longrecall.models.formats.stock import common_fields, first_module, merged
from longrecall.models.sizes import PlainConfig

_OUTPUT_NORM_EPS = 1e-5
"""Of the norm inside Gated DeltaNet; no key says it."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read an OlmoHybridConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    fields.require("hidden_act", "silu", ["silu"], "the activations are SiLU")
    # Older configs could leave away what every published model has.
    fields.require("linear_use_gate", True, [True], "Gated DeltaNet has an output gate")
    hidden, heads = fields.integer("hidden_size", 3840), fields.integer("num_attention_heads", 30)
    norm_eps, context = fields.number("rms_norm_eps", 1e-6), fields.integer("max_position_embeddings", 65536)
    linear, attention = _delta(fields, hidden, heads), _attention(fields, hidden, heads, norm_eps)
    mlp = {"type": "mlp", "inner_size": fields.integer("intermediate_size", 11008)}
    kinds = read_layer_types(fields, fields.integer("num_hidden_layers", 32), _kinds)
    if len(set(kinds)) < 2:
        raise UserError(f'{where}: the layers are all "{kinds[0]}"; transformers wants layers of both kinds')
    tied = fields.flag("tie_word_embeddings", False)
    config = {
        "vocab_size": fields.integer("vocab_size", 100352),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": tied,
        "residual_in_fp32": False,
        "context_length": context,
        **fields.token_ids(),
    }
    fields.ignore("attention_dropout", "full_attention_interval")
    # Initial values of training.
    fields.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    fields.finish()
    layers = [
        _layer(linear, mlp, after=False) if kind == LINEAR else _layer(attention, mlp, after=True) for kind in kinds
    ]
    sources: dict[str, Source] = {
        "model.embeddings.weight": same("model.embed_tokens.weight"),
        "model.norm.weight": same("model.norm.weight"),
        **({} if tied else {"lm_head.weight": same("lm_head.weight")}),
    }
    own = {LINEAR: _delta_sources(linear), FULL: _attention_sources(attention)}
    mlps = mlp_sources("mlp.", "mlp.")
    for index, kind in enumerate(kinds):
        for name, source in {**own[kind], **mlps}.items():
            sources[f"model.layers.{index}.{name}"] = source.under(f"model.layers.{index}.")
    copies = {"lm_head.weight": "model.embeddings.weight"} if tied else {}
    return Layout(PlainConfig.from_dict({**config, "layers": layers}), sources, copies)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the OlmoHybridConfig of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: a model without one of the two kinds of layers.
    """
    linear, attention = first_module(plain, "gated_delta_net"), first_attention(plain)
    if attention is None:
        raise UserError("no layer of this model has attention, and transformers wants at least one")
    own = {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        **common_fields(plain),
        "intermediate_size": first_module(plain, "mlp")["inner_size"],
        "rms_norm_eps": plain.norm_eps,
        "layer_types": layer_types(plain),
        "num_attention_heads": attention["num_heads"],
        "num_key_value_heads": attention["kv_heads"],
        "attention_bias": attention["qkv_bias"],
        "linear_num_key_heads": linear["num_heads"],
        "linear_num_value_heads": linear["value_heads"],
        "linear_key_head_dim": linear["key_dim"],
        "linear_value_head_dim": linear["value_dim"],
        "linear_conv_kernel_dim": linear["conv_width"],
        "linear_allow_neg_eigval": linear["negative_eigenvalues"],
        **written_rope(attention, kept),
    }
    if attention["head_dim"] * attention["num_heads"] != plain.hidden_size or "head_dim" in kept:
        own["head_dim"] = attention["head_dim"]
    return merged(kept, own)


def _kinds(fields: Fields, count: int) -> list[str]:
    del fields
    kinds = [FULL if index % 4 == 3 else LINEAR for index in range(count)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _delta(fields: Fields, hidden: int, heads: int) -> dict[str, Any]:
    keys = fields.optional_integer("linear_num_key_heads", heads) or heads
    width = fields.optional_integer("linear_key_head_dim") or max(1, int(0.75 * hidden / keys))
    return {
        "type": "gated_delta_net",
        "num_heads": keys,
        "value_heads": fields.optional_integer("linear_num_value_heads", heads),
        "key_dim": width,
        "value_dim": fields.optional_integer("linear_value_head_dim", 2 * width),
        "conv_width": fields.integer("linear_conv_kernel_dim", 4),
        "negative_eigenvalues": fields.flag("linear_allow_neg_eigval", True),
        "norm_eps": _OUTPUT_NORM_EPS,
    }


def _attention(fields: Fields, hidden: int, heads: int, norm_eps: float) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.optional_integer("num_key_value_heads", heads),
        "head_dim": fields.optional_integer("head_dim") or max(1, hidden // heads),
        **read_rope(fields),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "full",
        "qk_norm_eps": norm_eps,
    }


def _layer(mixer: dict[str, Any], mlp: dict[str, Any], *, after: bool) -> dict[str, Any]:
    """A layer whose norms stand before the blocks, or after them."""
    norms: dict[str, Any] = {"norm": None, "post_norm": {}} if after else {}
    return {"blocks": [{"name": "mixer", "module": mixer, **norms}, {"name": "mlp", "module": mlp, **norms}]}


def _delta_sources(mixer: dict[str, Any]) -> dict[str, Source]:
    names = ["A_log", "dt_bias", "o_norm.weight", *(f"{name}_proj.weight" for name in "qkvabgo")]
    sources = {f"mixer.{name}": same(f"linear_attn.{name}") for name in names}
    for name, weight in zip("qkv", _convolutions(channels(mixer)), strict=True):
        sources[f"mixer.{name}_conv.weight"] = squeeze_conv(weight.under("linear_attn."))
    return sources | {
        "mixer_norm.weight": same("attention_layer_norm.weight", "input_layernorm.weight"),
        "mlp_norm.weight": same("feedforward_layer_norm.weight", "post_attention_layernorm.weight"),
    }


def _convolutions(sizes: tuple[int, int, int]) -> list[Source]:
    """One tensor each for q, k and v, or all in one.

    transformers puts the three behind each other, and on saving cuts the whole into three equal parts. Where values are
    wider than keys, these are others than those it read.
    """
    names = [f"{name}_conv1d.weight" for name in "qkv"]
    published = [split(name, (size,))[0] for name, size in zip(names, sizes, strict=True)]
    fused = split("conv1d.weight", sizes)
    third, left = divmod(sum(sizes), 3)
    if left or third == sizes[0]:
        return [either(mine, theirs) for mine, theirs in zip(published, fused, strict=True)]
    equal = [_slice(names, third, sum(sizes[:index]), sizes[index]) for index in range(3)]
    return [either(*ways) for ways in zip(published, equal, fused, strict=True)]


def _slice(names: list[str], width: int, start: int, size: int) -> Source:
    """Rows `start` to `start + size` of tensors of `width` rows each that lie behind each other."""
    parts, sizes = [], []
    for index, name in enumerate(names):
        begin, end = max(start, index * width), min(start + size, (index + 1) * width)
        if begin < end:
            before, after = begin - index * width, (index + 1) * width - end
            pieces = [piece for piece in (before, end - begin, after) if piece]
            parts.append(split(name, pieces)[1 if before else 0])
            sizes.append(end - begin)
    return parts[0] if len(parts) == 1 else join(parts, sizes)


def _attention_sources(mixer: dict[str, Any]) -> dict[str, Source]:
    names = [f"{name}_proj.weight" for name in "qkvo"] + ["q_norm.weight", "k_norm.weight"]
    names += [f"{name}_proj.bias" for name in "qkvo"] if mixer["qkv_bias"] else []
    return {f"mixer.{name}": same(f"self_attn.{name}") for name in names} | {
        # On saving, transformers gives the first of these the name that it has in layers of Gated DeltaNet.
        "mixer_post_norm.weight": same("post_attention_layernorm.weight", "feedforward_layer_norm.weight"),
        "mlp_post_norm.weight": same("post_feedforward_layernorm.weight"),
    }
