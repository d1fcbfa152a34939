"""fla-format RWKV-7 (``model_type: rwkv7``): ``models/rwkv7`` of flash-linear-attention."""

from __future__ import annotations

import math
from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.fla_common import Mixer, attention_layers, projections
from longrecall.models.formats.fla_rwkv_common import Generation, low_rank, rwkv_layout, rwkv_stock_config
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import either, reshaped, same, stack
from longrecall.models.sizes import PlainConfig, mixer_of

_RWKV7 = Generation(
    "rwkv7",
    "RWKV7ForCausalLM",
    "rwkv7_channel",
    4,
    {"mix_k": "x_k", "k_proj.weight": "key.weight", "v_proj.weight": "value.weight"},
)
_MIXES = "rwkvag"
"""Inputs that are mixed with the token before, in the order of our `mix` and of the older files' one tensor."""
_RANKS = {
    "decay_low_rank_dim": ("decay_rank", 64, 2.5),
    "a_low_rank_dim": ("rate_rank", 64, 2.5),
    "gate_low_rank_dim": ("gate_rank", 128, 5.0),
    "v_low_rank_dim": ("value_rank", 16, 1.7),
}
"""Key -> our field, the value of a file without the key, the factor of one that is null."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a config.json (parsed; `where` names it in errors). UserError for what cannot be reproduced."""
    return rwkv_layout(raw, where, _RWKV7, _mixers)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of fla's RWKV-7 for a native model; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: there is no layer of RWKV-7.
    """
    found = [mixer for layer in plain.layers if (mixer := mixer_of(layer))["type"] == "rwkv7"]
    if not found:
        raise UserError('no layer of this model has a "rwkv7"')
    fields, hidden, key_dim = Fields(kept, ""), plain.hidden_size, found[0]["key_dim"]
    own: dict[str, Any] = {}
    if not kept or _head_dim(fields, hidden) != key_dim:
        own |= {"head_dim": key_dim, "num_heads": found[0]["num_heads"]}
    values = found[0]["num_heads"] * found[0]["value_dim"]
    if not kept or _value_width(fields, hidden, len(plain.layers)) != values:
        own["value_dim"] = [values] * len(plain.layers)
    for key, (name, _, _) in _RANKS.items():
        # The first layer has no values of another to mix in.
        rank = next((mixer[name] for mixer in found if mixer.get(name) is not None), None)
        if rank is not None and (not kept or _rank(fields, key, hidden, key_dim) != rank):
            own[key] = rank
    return rwkv_stock_config(plain, kept, _RWKV7, own)


def _head_dim(fields: Fields, hidden: int) -> int:
    """Key width of a head; where head_dim is given, num_heads says nothing (converted files have a wrong one)."""
    if "head_dim" in fields.raw and fields.get("head_dim") is None:
        return max(hidden // fields.integer("num_heads"), 1)
    fields.ignore("num_heads")
    return fields.integer("head_dim", 64)


def _value_width(fields: Fields, hidden: int, count: int) -> int:
    """Value channels of all heads together."""
    given = fields.get("value_dim")
    if given is None:
        return hidden
    each = given if isinstance(given, list) else [given] * count
    if len(each) != count or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in each):
        raise fields.fail("value_dim", f"it must be a whole number > 0, or a list of one for each of {count} layers")
    if len(set(each)) > 1:
        raise fields.fail("value_dim", "layers mix in the values of the first one, so all have to be as wide")
    return int(each[0])


def _rank(fields: Fields, key: str, hidden: int, head_dim: int) -> int:
    """A low-rank map's inner width; null is computed from the width of the model."""
    _, default, factor = _RANKS[key]
    if key not in fields.raw or fields.get(key) is not None:
        return fields.integer(key, default)
    # That of the gate does not depend on the heads.
    wide = 1 if key == "gate_low_rank_dim" else head_dim / 64
    return max(32, round(factor * math.sqrt(hidden) * wide / 32) * 32)


def _mixers(fields: Fields, hidden: int, count: int, eps: float) -> list[Mixer]:
    key_dim, values = _head_dim(fields, hidden), _value_width(fields, hidden, count)
    heads = hidden // key_dim
    if not heads or hidden % key_dim:
        raise fields.fail("head_dim", f"it must divide hidden_size ({hidden})")
    if values % heads:
        raise fields.fail("value_dim", f"it must be a multiple of the {heads} heads")
    if count > 1 and 0 in attention_layers(fields, hidden, count):
        raise fields.fail("attn", "later layers mix in the values of layer 0, which has to be recurrent")
    ranks = {name: _rank(fields, key, hidden, key_dim) for key, (name, _, _) in _RANKS.items()}
    value_rank = ranks.pop("value_rank")
    description = {
        "type": "rwkv7",
        "input_dim": hidden,
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": values // heads,
        "norm_eps": key_dim * eps,
        **ranks,
    }
    first = Mixer({**description, "gives_values": True}, _sources(hidden))
    later = Mixer(
        {**description, "value_rank": value_rank},
        _sources(hidden) | low_rank("value", "v_lora", bias="value_share"),
    )
    return [later if index else first for index in range(count)]


def _sources(hidden: int) -> dict[str, Source]:
    mixes = stack(reshaped(same(f"x_{name}"), (1, 1, hidden)) for name in _MIXES)
    return {
        "mix": either(mixes, same("x_x")),
        "removal_scale": same("k_k"),
        "rate_scale": same("k_a"),
        "bonus": same("r_k"),
        **projections([f"{name}_proj.weight" for name in "rkvo"]),
        **low_rank("decay", "w_lora", bias="decay"),
        **low_rank("rate", "a_lora", bias="rate"),
        **low_rank("gate", "g_lora", bias=None),
        "o_norm.weight": same("g_norm.weight"),
        "o_norm.bias": same("g_norm.bias"),
    }
