"""fla-format Kimi Delta Attention (``model_type: kda``): ``layers/kda.py`` of flash-linear-attention."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import (
    Defaults,
    Mixer,
    conv_fields,
    conv_width,
    convolutions,
    expanded_width,
    fla_layout,
    fla_stock_config,
    projections,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import either, reshaped, same
from longrecall.models.formats.stock import expansion, first_module
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults()


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixer)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's KDA for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "kda")
    value_heads = mixer.get("value_heads") or mixer["num_heads"]
    shared = value_heads != mixer["num_heads"] or kept.get("num_v_heads") is not None
    own = {
        "num_heads": mixer["num_heads"],
        **({"num_v_heads": value_heads} if shared else {}),
        "head_dim": mixer["key_dim"],
        "expand_v": expansion(kept, "expand_v", mixer["value_dim"], mixer["key_dim"]),
        **conv_fields(kept, mixer["conv_width"]),
        "allow_neg_eigval": mixer["negative_eigenvalues"],
        "lower_bound": mixer.get("decay_floor"),
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "kda", "KDAForCausalLM", own)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads, key_dim = fields.integer("num_heads", 16), fields.integer("head_dim", 128)
    value_heads, value_dim = fields.optional_integer("num_v_heads", heads), expanded_width(fields, key_dim, 1.0)
    assert value_heads is not None
    floor, width = fields.get("lower_bound"), conv_width(fields, True)
    if floor is not None and (isinstance(floor, bool) or not isinstance(floor, int | float) or not floor < 0):
        raise fields.fail("lower_bound", "it must be null, or the lowest log decay of a token, below 0")
    # It chooses a kernel.
    fields.ignore("safe_gate")
    names = [f"{name}_proj.weight" for name in "qkvbo"]
    names += [f"{name}_proj.{part}.weight" for name in "fg" for part in (0, 1)]
    description = {
        "type": "kda",
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "gate_rank": value_dim,
        "conv_width": width,
        "negative_eigenvalues": fields.flag("allow_neg_eigval", False),
        **({} if value_heads == heads else {"value_heads": value_heads}),
        **({} if floor is None else {"decay_floor": float(floor)}),
    }
    own = projections([*names, "g_proj.1.bias", "dt_bias", "o_norm.weight"])
    # The second is the shape of older files; they are written as those of today.
    own["A_log"] = either(reshaped(same("A_log"), (value_heads,)), reshaped(same("A_log"), (1, 1, value_heads, 1)))
    return Mixer(description, own | convolutions(width))
