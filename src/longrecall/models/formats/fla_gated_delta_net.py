"""fla-format Gated DeltaNet (``model_type: gated_deltanet``): ``layers/gated_deltanet.py``, fla 0.6.0."""

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
from longrecall.models.formats.stock import expansion, first_module
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults(num_hidden_layers=21)


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixer)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's Gated DeltaNet for a native model; `kept`: the one it was read from, or {}."""
    mixer = first_module(plain, "gated_delta_net")
    shared = mixer["value_heads"] != mixer["num_heads"] or kept.get("num_v_heads") is not None
    own = {
        "num_heads": mixer["num_heads"],
        **({"num_v_heads": mixer["value_heads"]} if shared else {}),
        "head_dim": mixer["key_dim"],
        "expand_v": expansion(kept, "expand_v", mixer["value_dim"], mixer["key_dim"]),
        **conv_fields(kept, mixer["conv_width"]),
        "use_gate": mixer["output_gate"],
        "allow_neg_eigval": mixer["negative_eigenvalues"],
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "gated_deltanet", "GatedDeltaNetForCausalLM", own)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads, key_dim = fields.integer("num_heads", 6), fields.integer("head_dim", 256)
    value_heads = fields.optional_integer("num_v_heads", heads)
    fields.require("output_gate_activation", "swish", ["swish", "silu"], "the output gate is a SiLU")
    fields.require("use_mamba_gate", True, [True], "the decay is Mamba-2's")
    width, gated = conv_width(fields, True), fields.flag("use_gate", True)
    names = [f"{name}_proj.weight" for name in ("qkvoabg" if gated else "qkvoab")]
    description = {
        "type": "gated_delta_net",
        "num_heads": heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": expanded_width(fields, key_dim, 2.0),
        "conv_width": width,
        "output_gate": gated,
        "negative_eigenvalues": fields.flag("allow_neg_eigval", False),
    }
    return Mixer(description, projections([*names, "A_log", "dt_bias", "o_norm.weight"]) | convolutions(width))
