"""fla-format Gated Linear Attention (``model_type: gla``): ``layers/gla.py`` of flash-linear-attention 0.6.0."""

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
    gated_norm,
    head_fields,
    head_width,
    key_value_repeats,
    projections,
    shared_heads,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.stock import first_module
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults()
# fla's model passes neither to its layer, so every checkpoint has these two.
GATE_RANK, GATE_DIVISOR = 16, 16.0


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a GLA config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixer)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's GLA for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "gla")
    own = {
        "num_heads": mixer["num_heads"],
        **head_fields(kept, mixer, plain.hidden_size),
        **conv_fields(kept, mixer["conv_width"]),
        "use_output_gate": mixer["output_gate"],
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "gla", "GLAForCausalLM", own)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads = fields.integer("num_heads", 4)
    fields.require("feature_map", None, [None], "queries and keys are used as projected")
    fields.require("clamp_min", None, [None], "the gate is not clamped")
    fields.require("use_gk", True, [True], "the gate on keys is what the mixer decays by")
    fields.require("use_gv", False, [False], "there is no gate on values")
    fields.require("gate_low_rank_dim", GATE_RANK, [GATE_RANK], "fla builds no other rank from a config")
    fields.require("gate_logit_normalizer", 16, [16, 16.0], "fla uses no other divisor from a config")
    width, gated = conv_width(fields, False), fields.flag("use_output_gate", True)
    names = [f"{name}_proj.weight" for name in ("qkvog" if gated else "qkvo")]
    names += ["gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias"]
    sources = {**projections(names), **convolutions(width), "o_norm.weight": gated_norm(fields)}
    grouped = ("k_proj.weight", "v_proj.weight", "gk_proj.1.weight", "gk_proj.1.bias", "k_conv.weight", "v_conv.weight")
    description = {
        "type": "gla",
        "num_heads": heads,
        "key_dim": head_width(fields, hidden, "expand_k", 0.5, heads),
        "value_dim": head_width(fields, hidden, "expand_v", 1.0, heads),
        "gate_rank": GATE_RANK,
        "gate_divisor": GATE_DIVISOR,
        "conv_width": width,
        "output_gate": gated,
    }
    return Mixer(description, shared_heads(sources, grouped, heads, key_value_repeats(fields, heads)))
