"""What the fla-format models share: the block around the mixer, hybrid attention layers, and config keys.

Facts are from flash-linear-attention 0.6.0: ``models/*/configuration_*.py``, ``modules/mlp.py``, ``layers/attn.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import constant, repeat_heads, same, squeeze_conv
from longrecall.models.formats.stock import common_fields, expansion, merged
from longrecall.models.sizes import PlainConfig, mixer_of
from longrecall.models.value_checks import LARGEST

# Rotary frequencies are computed from the config; old versions stored them.
_COMPUTED = ("rotary.inv_freq", "rotary_emb.inv_freq")
WITHOUT_EFFECT = (
    *("attn_mode", "mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
    *("fuse_linear_cross_entropy", "use_l2warp"),
)
"""Keys that say how fast a model runs or how it trains."""
_ATTENTION_KEYS = frozenset({"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"})


@dataclass(frozen=True)
class Mixer:
    """One mixer read from a foreign config: its native description and its tensors, names relative to the block's."""

    description: dict[str, Any]
    sources: dict[str, Source] = field(default_factory=dict)
    of_the_model: dict[str, Source] = field(default_factory=dict)
    """Tensors that the file has for all layers together, foreign names in full."""


@dataclass(frozen=True)
class Defaults:
    """Values of keys that a config.json may leave out; they differ between the families."""

    num_hidden_layers: int = 24
    hidden_ratio: int = 4


def fla_layout(
    raw: dict[str, Any], where: str, defaults: Defaults, mixer: Callable[[Fields, int], Mixer | list[Mixer]]
) -> Layout:
    """Read an fla config: `mixer(fields, hidden_size)` describes the family's own part, everything else is shared.

    It is one description for all layers, or a list with one each.

    Raises:
        UserError: a value that longrecall cannot reproduce, or a key it does not know; the message names it.
    """
    fields = Fields(raw, where)
    hidden = fields.integer("hidden_size", 2048)
    count = fields.integer("num_hidden_layers", defaults.num_hidden_layers)
    fields.require("hidden_act", "swish", ["swish"], "the MLP is a SwiGLU")
    fields.require("attnres_block_size", None, [None], "attention residuals are not implemented")
    norm_eps = fields.number("norm_eps", 1e-6)
    width = mlp_width(
        hidden, fields.get("hidden_ratio", defaults.hidden_ratio), fields.optional_integer("intermediate_size")
    )
    own = mixer(fields, hidden)
    attention = attention_layers(fields, hidden, count)
    fields.ignore(*WITHOUT_EFFECT)
    # Whether q, k and v share a convolution shows in the tensor names; the key itself is a leftover of old versions.
    fields.ignore("share_conv_kernel")
    config: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size", 32000),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": False,
        "context_length": fields.integer("max_position_embeddings", 2048),
        **fields.token_ids(),
    }
    fields.finish()
    each = own if isinstance(own, list) else [own] * count
    mixers = [attention.get(index, each[index]) for index in range(count)]
    layers = [{"mixer": {**_eps(m, norm_eps), **m.description}, "mlp_size": width} for m in mixers]
    tied = config["tie_word_embeddings"]
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": layers}),
        sources=_block_sources(mixers, tied),
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        ignored_suffixes=_COMPUTED,
    )


def fla_stock_config(
    plain: PlainConfig, kept: dict[str, Any], defaults: Defaults, kind: str, architecture: str, own: dict[str, Any]
) -> dict[str, Any]:
    """Return the config.json of an fla model; `own` are the fields of the family's mixer, the others are shared.

    Args:
        plain: the native model.
        kept: the config.json that it was read from, or {}.
        defaults: of the family.
        kind, architecture: its "model_type" and the name of its class.
        own: what `mixer` of `fla_layout` reads.
    """
    width = next((layer["mlp_size"] for layer in plain.layers if "mlp_size" in layer), 0)
    ratio, given = kept.get("hidden_ratio", defaults.hidden_ratio), kept.get("intermediate_size")
    said = bool(kept) and mlp_width(plain.hidden_size, ratio, given) == width
    return merged(
        kept,
        {
            "model_type": kind,
            "architectures": [architecture],
            **common_fields(plain),
            "norm_eps": plain.norm_eps,
            **({} if said else {"intermediate_size": width}),
            "attn": attention_field(plain, kept),
            **own,
        },
    )


def head_fields(kept: dict[str, Any], mixer: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """The widths of heads as factors of hidden_size: the inverse of `head_width`."""
    names = {"expand_k": "key_dim", "expand_v": "value_dim"}
    widths = {key: mixer["num_heads"] * mixer[name] for key, name in names.items()}
    return {key: expansion(kept, key, width, hidden_size) for key, width in widths.items()}


def conv_fields(kept: dict[str, Any], width: int) -> dict[str, Any]:
    """The short convolutions: the inverse of `conv_width`."""
    return {"use_short_conv": width > 0, **({"conv_size": width} if width else {})}


def attention_field(plain: PlainConfig, kept: dict[str, Any]) -> Any:
    """The softmax attention layers of a hybrid as "attn"; as it was written, where that says the same."""
    specs: list[dict[str, Any]] = []
    for index, layer in enumerate(plain.layers):
        mixer = mixer_of(layer)
        if mixer.get("type") != "attention":
            continue
        spec = {
            "num_heads": mixer["num_heads"],
            "num_kv_heads": mixer["kv_heads"],
            "qkv_bias": mixer["qkv_bias"],
            "window_size": mixer["window"],
            "rope_theta": mixer["rope_theta"],
        }
        same_spec = next((known for known in specs if {**known, "layers": []} == {"layers": [], **spec}), None)
        if same_spec is None:
            specs.append({"layers": [index], **spec})
        else:
            same_spec["layers"].append(index)
    field = None if not specs else specs[0] if len(specs) == 1 else specs
    said, wanted = (
        attention_layers(Fields({"attn": value}, ""), plain.hidden_size, len(plain.layers))
        for value in (kept.get("attn"), field)
    )
    return kept.get("attn") if said == wanted else field


def _eps(mixer: Mixer, norm_eps: float) -> dict[str, float]:
    return {} if mixer.description["type"] == "attention" else {"norm_eps": norm_eps}


def _block_sources(mixers: Sequence[Mixer], tied: bool) -> dict[str, Source]:
    sources = {name: same(name) for name in ("model.embeddings.weight", "model.norm.weight")}
    if not tied:
        sources["lm_head.weight"] = same("lm_head.weight")
    for index, mixer in enumerate(mixers):
        block = f"model.layers.{index}."
        sources[f"{block}mixer_norm.weight"] = same(f"{block}attn_norm.weight")
        for name in ("mlp_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            sources[f"{block}{name}.weight"] = same(f"{block}{name}.weight")
        sources |= mixer_sources(mixer, block)
    return sources


def mixer_sources(mixer: Mixer, block: str) -> dict[str, Source]:
    """Where the tensors of the mixer in the layer with the prefix `block` come from."""
    own = {f"{block}mixer.{name}": source.under(f"{block}attn.") for name, source in mixer.sources.items()}
    return own | {f"{block}mixer.{name}": source for name, source in mixer.of_the_model.items()}


def mlp_width(hidden_size: int, ratio: object, given: int | None) -> int:
    """Inner width of fla's gated MLP: as given, else 2/3 * ratio * hidden_size rounded up to a multiple of 256.

    Raises:
        UserError: a ratio that is no number > 0 (null means 4).
    """
    if given is not None:
        return given
    ratio = 4 if ratio is None else ratio
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= LARGEST:
        raise UserError(f'"hidden_ratio" is {ratio!r}; it must be a number > 0')
    return 256 * -(-int(hidden_size * ratio * 2 / 3) // 256)


def head_width(fields: Fields, hidden_size: int, key: str, default: float, heads: int) -> int:
    """Width of one head: hidden_size * expansion / heads, which must be whole."""
    total = hidden_size * fields.number(key, default)
    if abs(total - round(total)) > 1e-6 * total or round(total) % heads:
        raise fields.fail(key, f"hidden_size ({hidden_size}) times it must be a whole multiple of the {heads} heads")
    return round(total) // heads


def expanded_width(fields: Fields, key_dim: int, default: float) -> int:
    """Value width of a head of `key_dim` keys: that times expand_v, which must be whole."""
    width = key_dim * fields.number("expand_v", default)
    if abs(width - round(width)) > 1e-5 * width or not round(width):
        raise fields.fail("expand_v", f"head_dim ({key_dim}) times it must be whole")
    return round(width)


def conv_width(fields: Fields, default: bool) -> int:
    """Width of the short convolutions, 0 when the model has none."""
    width = fields.integer("conv_size", 4)
    fields.require("conv_bias", False, [False], "short convolutions on q, k and v have no bias")
    return width if fields.flag("use_short_conv", default) else 0


def key_value_repeats(fields: Fields, heads: int) -> int:
    """How many query heads share one key/value head; their weights are written out once per head on reading."""
    groups = fields.optional_integer("num_kv_heads") or heads
    if heads % groups:
        raise fields.fail("num_kv_heads", f"it must divide num_heads ({heads})")
    return heads // groups


def projections(names: Sequence[str]) -> dict[str, Source]:
    """Tensors that are called the same on both sides."""
    return {name: same(name) for name in names}


def convolutions(width: int) -> dict[str, Source]:
    """The short convolutions on q, k and v, when there are any."""
    return {f"{n}_conv.weight": squeeze_conv(same(f"{n}_conv1d.weight")) for n in "qkv"} if width else {}


def shared_heads(sources: dict[str, Source], names: Sequence[str], heads: int, repeats: int) -> dict[str, Source]:
    """Return `sources` with the rows of the named tensors repeated per query head; unchanged when none are shared."""
    own = heads // repeats
    return {n: repeat_heads(source, own, repeats) if n in names else source for n, source in sources.items()}


def gated_norm(fields: Fields) -> Source:
    """The per-head output norm of GLA and RetNet: its name depends on fuse_norm, its scale may be fixed at 1."""
    fused = fields.get("fuse_norm", True) is not False
    if fields.get("elementwise_affine", True) in (True, None):
        names = ("g_norm_swish_gate.weight", "g_norm.weight")
        return same(*(names if fused else reversed(names)))
    fields.flag("elementwise_affine", True)
    return constant(1.0)


def attention_layers(fields: Fields, hidden: int, count: int) -> dict[int, Mixer]:
    """Hybrid models: layer index -> softmax attention."""
    given = fields.get("attn")
    if given is None:
        return {}
    found: dict[int, Mixer] = {}
    for spec in [given] if isinstance(given, dict) else given if isinstance(given, list) else [None]:
        if not isinstance(spec, dict) or not isinstance(spec.get("layers"), list):
            raise fields.fail("attn", 'it must be null or mappings with "layers" and "num_heads"')
        unknown = sorted(set(spec) - _ATTENTION_KEYS)
        if unknown:
            raise fields.fail("attn", f'longrecall does not know its key "{unknown[0]}"')
        mixer = _attention(Fields(spec, f'{fields.where}: "attn"'), hidden)
        for index in spec["layers"]:
            if not isinstance(index, int) or not 0 <= index < count or index in found:
                raise fields.fail("attn", f"layer {index!r} is no index below {count} or is named twice")
            found[index] = mixer
    return found


def _attention(fields: Fields, hidden: int) -> Mixer:
    heads = fields.integer("num_heads")
    if hidden % heads:
        raise fields.fail("num_heads", f"it must divide hidden_size ({hidden})")
    bias = fields.flag("qkv_bias", False)
    names = [f"{name}_proj.weight" for name in "qkvo"] + [f"{name}_proj.bias" for name in "qkv" if bias]
    description = {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.optional_integer("num_kv_heads", heads),
        "head_dim": hidden // heads,
        "window": fields.optional_integer("window_size"),
        "rope_theta": fields.number("rope_theta", 10000.0),
        "qkv_bias": bias,
    }
    return Mixer(description, projections(names))
