"""fla-format Mixture of Memories (``model_type: mom``): ``layers/mom.py`` of flash-linear-attention."""

from __future__ import annotations

import math
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import (
    Defaults,
    Mixer,
    attention_layers,
    conv_fields,
    conv_width,
    convolutions,
    expanded_width,
    fla_layout,
    fla_stock_config,
    projections,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import join, same
from longrecall.models.formats.stock import expansion, first_module
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults()


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return fla_layout(raw, where, _DEFAULTS, _mixer)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's MoM for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "mom")
    own = {
        "num_heads": mixer["num_heads"],
        "head_dim": mixer["key_dim"],
        "expand_v": expansion(kept, "expand_v", mixer["value_dim"], mixer["key_dim"]),
        **conv_fields(kept, mixer["conv_width"]),
        "use_output_gate": mixer["output_gate"],
        "num_memories": mixer["memories"],
        "topk": mixer["active"],
        "shared_mem": mixer["shared"],
        "single_kv_proj": mixer.get("tied_projections", False),
        "aux_loss_scale": _scale(kept, mixer["balance"], mixer["active"], len(plain.layers)),
    }
    return fla_stock_config(plain, kept, _DEFAULTS, "mom", "MomForCausalLM", own)


def _balance(scale: float, active: int, layers: int) -> float:
    """Weight of our balance loss, which takes shares where fla counts choices; fla has one loss for all layers."""
    return scale * active / layers


def _scale(kept: dict[str, Any], balance: float, active: int, layers: int) -> float:
    """The inverse of `_balance`: as it was written where that says the same, else the nearest short number."""
    near = balance * layers / active
    others = [round(near, 12), near, math.nextafter(near, math.inf), math.nextafter(near, 0)]
    said = [kept.get("aux_loss_scale", 0.01), *others]
    return next((scale for scale in said if _balance(scale, active, layers) == balance), near)


def _mixer(fields: Fields, hidden: int) -> Mixer:
    heads, key_dim = fields.integer("num_heads", 4), fields.integer("head_dim", 256)
    value_dim, width = expanded_width(fields, key_dim, 1.0), conv_width(fields, True)
    fields.require("use_short_conv", True, [True], "fla has no such model without short convolutions")
    fields.require("mom_backend", "gated_deltanet", ["gated_deltanet"], "memories are updated by the gated delta rule")
    memories, active = fields.integer("num_memories", 4), fields.integer("topk", 2)
    if active > memories:
        raise fields.fail("topk", f"there are {memories} memories to choose from")
    shared, tied = fields.flag("shared_mem", True), fields.flag("single_kv_proj", False)
    gated, scale = fields.flag("use_output_gate", True), fields.get("aux_loss_scale", 0.01)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < 1e6:
        raise fields.fail("aux_loss_scale", "it must be a number from 0")
    # How large buffers are, and a switch that nothing reads.
    fields.ignore("capacity", "use_layer_wise_balance")
    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    for other in attention_layers(fields, hidden, count).values():
        if other.description["qkv_bias"] or other.description["rope_theta"] != 10000.0:
            raise fields.fail("attn", "fla's MoM hands neither qkv_bias nor rope_theta to its attention layers")
    names = ["q_proj.weight", *(["g_proj.weight"] if gated else []), "o_proj.weight"]
    sources = projections([*names, "A_log", "dt_bias", "o_norm.weight"]) | convolutions(width)
    sources["router.weight"] = same("gate.weight")
    rows = {"k": heads * key_dim, "v": heads * value_dim, "b": heads, "a": heads}
    for name, size in rows.items():
        sources[f"{name}_proj.weight"] = _of_memories(name, size, memories, shared, tied)
    description = {
        "type": "mom",
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "memories": memories,
        "active": active,
        "shared": shared,
        "conv_width": width,
        "output_gate": gated,
        "balance": _balance(float(scale), active, count),
        "tied": True,
        **({"tied_projections": True} if tied else {}),
    }
    return Mixer(description, sources)


def _of_memories(name: str, rows: int, memories: int, shared: bool, tied: bool) -> Source:
    """The projections of all memories one after the other, that of the shared one last; or one for all."""
    last = same(f"shared_{name}.weight")
    if tied:
        return last
    each = [same(f"{name}_proj.{index}.weight") for index in range(memories)] + ([last] if shared else [])
    return join(each, [rows] * len(each))
