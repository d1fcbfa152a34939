"""fla-format DeltaNet (``model_type: delta_net``): ``layers/delta_net.py`` of flash-linear-attention 0.6.0."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import (
    Defaults,
    Mixer,
    conv_fields,
    conv_width,
    convolutions,
    fla_layout,
    fla_stock_config,
    head_fields,
    head_width,
    projections,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.stock import first_module
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults()


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a DeltaNet config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixer)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's DeltaNet for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "delta_net")
    own = {
        "num_heads": mixer["num_heads"],
        **head_fields(kept, mixer, plain.hidden_size),
        **conv_fields(kept, mixer["conv_width"]),
        "use_gate": mixer["output_gate"],
        "allow_neg_eigval": mixer["negative_eigenvalues"],
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "delta_net", "DeltaNetForCausalLM", own)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads = fields.integer("num_heads", 16)
    fields.require("qk_norm", "l2", ["l2"], "queries and keys have unit length")
    fields.require("qk_activation", "silu", ["silu"], "queries and keys go through SiLU")
    fields.require("use_beta", True, [True], "the writing strength is learnt")
    fields.require("use_output_norm", True, [True], "the output is normalised per head")
    width, gated = conv_width(fields, True), fields.flag("use_gate", False)
    names = [f"{name}_proj.weight" for name in ("qkvobg" if gated else "qkvob")]
    description = {
        "type": "delta_net",
        "num_heads": heads,
        "key_dim": head_width(fields, hidden, "expand_k", 1.0, heads),
        "value_dim": head_width(fields, hidden, "expand_v", 1.0, heads),
        "conv_width": width,
        "output_gate": gated,
        "negative_eigenvalues": fields.flag("allow_neg_eigval", False),
    }
    return Mixer(description, projections([*names, "o_norm.weight"]) | convolutions(width))
