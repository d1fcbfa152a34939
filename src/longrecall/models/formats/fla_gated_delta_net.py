"""fla-format Gated DeltaNet (``model_type: gated_deltanet``): ``layers/gated_deltanet.py``, fla 0.6.0."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import Defaults, Mixer, conv_width, convolutions, fla_layout, projections
from longrecall.models.formats.sources import Layout

MODEL_TYPE = "gated_deltanet"


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, Defaults(num_hidden_layers=21), _mixer)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads, key_dim = fields.integer("num_heads", 6), fields.integer("head_dim", 256)
    value_heads = fields.optional_integer("num_v_heads", heads)
    value_dim = key_dim * fields.number("expand_v", 2.0)
    if abs(value_dim - round(value_dim)) > 1e-5 * value_dim:
        raise fields.fail("expand_v", f"head_dim ({key_dim}) times it must be whole")
    fields.require("output_gate_activation", "swish", ["swish", "silu"], "the output gate is a SiLU")
    fields.require("use_mamba_gate", True, [True], "the decay is Mamba-2's")
    width, gated = conv_width(fields, True), fields.flag("use_gate", True)
    names = [f"{name}_proj.weight" for name in ("qkvoabg" if gated else "qkvoab")]
    description = {
        "type": "gated_delta_net",
        "num_heads": heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": round(value_dim),
        "conv_width": width,
        "output_gate": gated,
        "negative_eigenvalues": fields.flag("allow_neg_eigval", False),
    }
    return Mixer(description, projections([*names, "A_log", "dt_bias", "o_norm.weight"]) | convolutions(width))
