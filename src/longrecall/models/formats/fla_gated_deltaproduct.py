"""fla-format Gated DeltaProduct (``model_type: gated_deltaproduct``): ``layers/gated_deltaproduct.py`` of fla."""

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
    """Return the config.json of fla's Gated DeltaProduct of a native model; `kept`: what it was read from, or {}."""
    mixer = first_module(plain, "gated_delta_product")
    own = {
        "num_heads": mixer["num_heads"],
        "head_dim": mixer["key_dim"],
        "expand_v": expansion(kept, "expand_v", mixer["value_dim"], mixer["key_dim"]),
        **conv_fields(kept, mixer["conv_width"]),
        "use_output_gate": mixer["output_gate"],
        "use_forget_gate": mixer["decay"],
        "allow_neg_eigval": mixer["negative_eigenvalues"],
        "num_householder": mixer["steps"],
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "gated_deltaproduct", "GatedDeltaProductForCausalLM", own)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads, key_dim = fields.integer("num_heads", 6), fields.integer("head_dim", 256)
    if fields.optional_integer("num_v_heads", heads) != heads:
        raise fields.fail("num_v_heads", "fla's model does not hand it to its layers")
    width, gated, decay = (
        conv_width(fields, True),
        fields.flag("use_output_gate", True),
        fields.flag("use_forget_gate", False),
    )
    names = [f"{name}_proj.weight" for name in "qkvb" + "a" * decay + "g" * gated + "o"]
    names += ["A_log", "dt_bias"] if decay else []
    description = {
        "type": "gated_delta_product",
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": expanded_width(fields, key_dim, 2.0),
        "steps": fields.integer("num_householder", 1),
        "decay": decay,
        "conv_width": width,
        "output_gate": gated,
        "negative_eigenvalues": fields.flag("allow_neg_eigval", False),
    }
    return Mixer(description, projections([*names, "o_norm.weight"]) | convolutions(width))
