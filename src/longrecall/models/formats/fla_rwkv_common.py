"""What fla's RWKV-6 and RWKV-7 share: blocks of time mixing and channel mixing under layer norms, hybrid attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import (
    WITHOUT_EFFECT,
    Mixer,
    attention_field,
    attention_layers,
    mixer_sources,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same
from longrecall.models.formats.stock import common_fields, find_module, merged
from longrecall.models.sizes import PlainConfig
from longrecall.models.value_checks import LARGEST


@dataclass(frozen=True)
class Generation:
    """What tells a generation of RWKV from the next.

    Attributes:
        kind, architecture: its "model_type" and the name of fla's class.
        channel: the type of its channel mixing here.
        hidden_ratio: inner width of the channel mixing per hidden_size, where a file does not say.
        channel_names: tensors of the channel mixing -> those of the file, below ``ffn.``.
    """

    kind: str
    architecture: str
    channel: str
    hidden_ratio: float
    channel_names: dict[str, str]


def rwkv_layout(
    raw: dict[str, Any], where: str, generation: Generation, mixers: Callable[[Fields, int, int, float], list[Mixer]]
) -> Layout:
    """Read an fla config: `mixers(fields, hidden_size, layers, norm_eps)` describes the time mixing of every layer.

    Raises:
        UserError: a value that longrecall cannot reproduce, or a key it does not know; the message names it.
    """
    fields = Fields(raw, where)
    hidden, count = fields.integer("hidden_size", 2048), fields.integer("num_hidden_layers", 24)
    fields.require("hidden_act", "sqrelu", ["sqrelu"], "channels are mixed after a squared ReLU")
    bias, eps, first = fields.flag("norm_bias", True), fields.number("norm_eps", 1e-5), fields.flag("norm_first", True)
    norm = {"kind": "layer", "bias": bias}
    ratio = fields.get("hidden_ratio", generation.hidden_ratio)
    inner = channel_width(hidden, ratio, fields.optional_integer("intermediate_size"), generation.hidden_ratio)
    own = mixers(fields, hidden, count, eps)
    attention = attention_layers(fields, hidden, count)
    each = [attention.get(index, own[index]) for index in range(count)]
    tied = fields.flag("tie_word_embeddings", False)
    config: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size", 32000),
        "hidden_size": hidden,
        "norm_eps": eps,
        "tie_word_embeddings": tied,
        "residual_in_fp32": False,
        "context_length": fields.integer("max_position_embeddings", 2048),
        "final_norm": norm,
        **({"embedding_norm": norm} if first else {}),
        **fields.token_ids(),
    }
    fields.ignore(*WITHOUT_EFFECT)
    fields.finish()
    channel = {"type": generation.channel, "input_dim": hidden, "inner_dim": inner}
    layers = [
        {
            "blocks": [
                {"name": "mixer", "module": mixer.description, "norm": norm},
                {"name": "mlp", "module": channel, "norm": norm},
            ]
        }
        for mixer in each
    ]
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": layers}),
        sources=_sources(each, generation, first, bias, tied),
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        ignored_suffixes=("rotary.inv_freq", "rotary_emb.inv_freq"),
    )


def rwkv_stock_config(
    plain: PlainConfig, kept: dict[str, Any], generation: Generation, own: dict[str, Any]
) -> dict[str, Any]:
    """Return the config.json of an RWKV model of fla; `own` are the fields of its time mixing.

    Raises:
        UserError: there is no channel mixing.
    """
    channel, norm = find_module(plain, generation.channel), plain.final_norm or {}
    if channel is None:
        raise UserError(f'no layer of this model has a "{generation.channel}"')
    ratio, given = kept.get("hidden_ratio", generation.hidden_ratio), kept.get("intermediate_size")
    said = bool(kept) and channel_width(plain.hidden_size, ratio, given, generation.hidden_ratio)
    return merged(
        kept,
        {
            "model_type": generation.kind,
            "architectures": [generation.architecture],
            **common_fields(plain),
            "norm_eps": plain.norm_eps,
            "norm_bias": bool(norm.get("bias", False)),
            "norm_first": plain.embedding_norm is not None,
            **({} if said == channel["inner_dim"] else {"intermediate_size": channel["inner_dim"]}),
            "attn": attention_field(plain, kept),
            **own,
        },
    )


def channel_width(hidden_size: int, ratio: object, given: int | None, default: float) -> int:
    """Inner width of the channel mixing: as given, else ratio * hidden_size rounded up to a multiple of 32.

    Raises:
        UserError: a ratio that is no number > 0 (null means the default).
    """
    if given is not None:
        return given
    ratio = default if ratio is None else ratio
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= LARGEST:
        raise UserError(f'"hidden_ratio" is {ratio!r}; it must be a number > 0')
    return 32 * -(-int(hidden_size * ratio) // 32)


def low_rank(name: str, foreign: str, *, bias: str | None) -> dict[str, Source]:
    """A low-rank map `{name}_down`, `{name}_up` of the file's `foreign`; `bias`: what its bias is called here."""
    found = {
        f"{name}_down.weight": same(f"{foreign}.lora.0.weight"),
        f"{name}_up.weight": same(f"{foreign}.lora.2.weight"),
    }
    return found | ({} if bias is None else {bias: same(f"{foreign}.lora.2.bias")})


def _sources(mixers: Sequence[Mixer], generation: Generation, first: bool, bias: bool, tied: bool) -> dict[str, Source]:
    found: dict[str, Source] = {"model.embeddings.weight": same("model.embeddings.weight")}
    if not tied:
        found["lm_head.weight"] = same("lm_head.weight")
    norms = {"model.norm": "model.norm"}
    if first:
        norms["model.embedding_norm"] = "model.layers.0.pre_norm"
    for index, mixer in enumerate(mixers):
        block = f"model.layers.{index}."
        norms |= {f"{block}mixer_norm": f"{block}attn_norm", f"{block}mlp_norm": f"{block}ffn_norm"}
        found |= mixer_sources(mixer, block)
        for name, foreign in generation.channel_names.items():
            found[f"{block}mlp.{name}"] = same(f"{block}ffn.{foreign}")
    for name, foreign in norms.items():
        for part in ("weight", "bias") if bias else ("weight",):
            found[f"{name}.{part}"] = same(f"{foreign}.{part}")
    return found
