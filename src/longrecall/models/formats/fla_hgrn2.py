"""fla-format HGRN2 (``model_type: hgrn2``): ``models/hgrn2`` of flash-linear-attention.

The model holds a table of lower bounds of the forget gates for all layers. Here the first recurrent layer holds it.
"""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import (
    Defaults,
    Mixer,
    attention_layers,
    conv_fields,
    conv_width,
    fla_layout,
    fla_stock_config,
    projections,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import constant, same, squeeze_conv
from longrecall.models.formats.stock import first_module
from longrecall.models.sizes import PlainConfig, mixer_of

_DEFAULTS = Defaults()
NORM_EPS = 1e-6
"""Of the norm before the output projection: the layer does not hand on what config.json says."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixers)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's HGRN2 for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "hgrn2")
    said = bool(kept) and _head_width(Fields(kept, ""), plain.hidden_size) == mixer["key_dim"]
    own = {
        **({} if said else {"expand_ratio": mixer["key_dim"], "num_heads": mixer["num_heads"]}),
        **conv_fields(kept, mixer["conv_width"]),
        "use_lower_bound": any(mixer_of(layer).get("bound_rows") for layer in plain.layers),
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "hgrn2", "HGRN2ForCausalLM", own)


def _head_width(fields: Fields, hidden: int) -> int:
    """Key width of a head; where expand_ratio is given, num_heads says nothing."""
    if "expand_ratio" in fields.raw and fields.get("expand_ratio") is None:
        return max(hidden // fields.integer("num_heads"), 1)
    fields.ignore("num_heads")
    return fields.integer("expand_ratio", 128)


def _mixers(fields: Fields, hidden: int) -> list[Mixer]:
    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    key_dim = _head_width(fields, hidden)
    heads = hidden // key_dim
    if not heads or hidden % heads:
        raise fields.fail("expand_ratio", f"hidden_size ({hidden}) must be a multiple of the {heads} heads it makes")
    bounds = fields.flag("use_lower_bound", True)
    if bounds and heads * key_dim != hidden:
        raise fields.fail("expand_ratio", f"{heads} heads of it are no {hidden} channels, which lower bounds are for")
    width = conv_width(fields, False)
    sources = projections([f"{name}_proj.weight" for name in "qfio"])
    if width:
        sources |= {f"{name}_conv.weight": squeeze_conv(same(f"{name}_conv1d.weight")) for name in "qfi"}
    # null is false, as in the module that gets it
    scaled = fields.get("elementwise_affine", True) is not None and fields.flag("elementwise_affine", True)
    sources["o_norm.weight"] = same("g_norm.weight") if scaled else constant(1.0)
    description = {
        "type": "hgrn2",
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": hidden // heads,
        "conv_width": width,
        "norm_eps": NORM_EPS,
        **({"conv_activation": None} if width else {}),
    }
    if not bounds:
        return [Mixer(description, sources)] * count
    attention = attention_layers(fields, hidden, count)
    holder = next((index for index in range(count) if index not in attention), 0)
    found = []
    for index in range(count):
        rows: dict[str, int] = {"bound_rows": count} if index == holder else {}
        rows |= {"bound_row": index} if index else {}
        table = {"bounds": same("model.lower_bounds")} if index == holder else {}
        found.append(Mixer({**description, **rows}, sources, table))
    return found
