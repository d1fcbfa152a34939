"""fla-format RetNet (``model_type: retnet``): ``layers/multiscale_retention.py`` of flash-linear-attention 0.6.0."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import (
    Defaults,
    Mixer,
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

_DEFAULTS = Defaults(hidden_ratio=2)


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a RetNet config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixer)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's RetNet for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "retnet")
    own = {
        "num_heads": mixer["num_heads"],
        **head_fields(kept, mixer, plain.hidden_size),
        "use_output_gate": mixer["output_gate"],
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "retnet", "RetNetForCausalLM", own)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads = fields.integer("num_heads", 8)
    fields.require("feature_map", None, [None], "queries and keys are used as projected")
    # fla's RetNet model never hands these on: whatever they say, its layers have no convolution.
    fields.ignore("use_short_conv", "conv_size", "conv_bias")
    gated = fields.flag("use_output_gate", True)
    key_dim = head_width(fields, hidden, "expand_k", 1.0, heads)
    if key_dim % 2:
        raise fields.fail("expand_k", f"rotary embeddings need an even key width per head, this gives {key_dim}")
    names = [f"{name}_proj.weight" for name in ("qkvog" if gated else "qkvo")]
    sources = {**projections(names), "o_norm.weight": gated_norm(fields)}
    description = {
        "type": "retnet",
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": head_width(fields, hidden, "expand_v", 2.0, heads),
        "output_gate": gated,
    }
    grouped = ("k_proj.weight", "v_proj.weight")
    return Mixer(description, shared_heads(sources, grouped, heads, key_value_repeats(fields, heads)))
