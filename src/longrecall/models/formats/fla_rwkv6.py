"""fla-format RWKV-6 (``model_type: rwkv6``): ``models/rwkv6`` of flash-linear-attention."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import Mixer, head_fields, head_width, projections
from longrecall.models.formats.fla_rwkv_common import Generation, low_rank, rwkv_layout, rwkv_stock_config
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import reordered, reshaped, same, transposed
from longrecall.models.formats.stock import first_module
from longrecall.models.sizes import PlainConfig

_RWKV6 = Generation(
    "rwkv6",
    "RWKV6ForCausalLM",
    "rwkv6_channel",
    3.5,
    {
        "mix_k": "key.mu",
        "mix_r": "receptance.mu",
        "k_proj.weight": "key.linear.weight",
        "v_proj.weight": "value.weight",
        "r_proj.weight": "receptance.linear.weight",
    },
)
_ORDER = (0, 2, 3, 4, 1)
"""Where the inputs that are mixed, ours r, k, v, g, w, stand in the file: r, w, k, v, g."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return rwkv_layout(raw, where, _RWKV6, _mixers)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's RWKV-6 for a native model; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "rwkv6")
    own = {
        "num_heads": mixer["num_heads"],
        **head_fields(kept, mixer, plain.hidden_size),
        "proj_low_rank_dim": mixer["mix_rank"],
        "gate_low_rank_dim": mixer["decay_rank"],
    }
    return rwkv_stock_config(plain, kept, _RWKV6, own)


def _mixers(fields: Fields, hidden: int, count: int, eps: float) -> list[Mixer]:
    heads, rank = fields.integer("num_heads", 4), fields.integer("proj_low_rank_dim", 32)
    description = {
        "type": "rwkv6",
        "input_dim": hidden,
        "num_heads": heads,
        "key_dim": head_width(fields, hidden, "expand_k", 0.5, heads),
        "value_dim": head_width(fields, hidden, "expand_v", 1.0, heads),
        "mix_rank": rank,
        "decay_rank": fields.integer("gate_low_rank_dim", 64),
        "norm_eps": eps,
    }
    return [Mixer(description, _sources(hidden, rank))] * count


def _sources(hidden: int, rank: int) -> dict[str, Source]:
    mixes = len(_ORDER)
    rows = [rank * block + row for block in _ORDER for row in range(rank)]
    up = reshaped(transposed(same("x_proj.2.weight")), (mixes * rank, hidden))
    return {
        "mix_x": same("x_proj.0.mu"),
        "mix": reordered(same("x_bias"), _ORDER),
        "mix_down.weight": reordered(same("x_proj.0.linear.weight"), rows),
        "mix_up": reordered(up, _ORDER),
        **{f"{name}_proj.weight": same(f"{name}_proj.linear.weight") for name in "rkvg"},
        **projections(["bonus", "o_proj.weight"]),
        **low_rank("decay", "w_proj.linear", bias="decay"),
        "o_norm.weight": same("g_norm.weight"),
        "o_norm.bias": same("g_norm.bias"),
    }
