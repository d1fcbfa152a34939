"""Mixers as a recipe names them: by their type, sized for a width, or as a description with sizes relative to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError, did_you_mean

_SHARE = re.compile(r"(?:([0-9]+)\s*\*\s*)?(width|length)(?:\s*/\s*([0-9]+))?")
_COMPARED = re.compile(r"(min|max)\(\s*([0-9]+)\s*,\s*([^,]+)\)")

CYCLE = "cycle"
"""``{cycle: [A, B], label: ...}``: layer i has the mixer i modulo 2."""

_RWKV = {"input_dim": "width", "num_heads": "max(1, width/64)", "key_dim": "min(64, width)"}
_TWO_HEADS = {"num_heads": 2, "key_dim": "width/2", "value_dim": "width/2"}
_MAMBA = {"type": "mamba", "inner_dim": "2*width", "state_dim": 16, "dt_rank": "max(1, width/16)"}
_ATTENTION = {"type": "attention", "num_heads": 1, "head_dim": "width"}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "num_heads": 2, "key_dim": "width/4", "value_dim": "width/2"},
    "retnet": {"type": "retnet", "num_heads": 2, "key_dim": "width/2", "value_dim": "width"},
    "delta_net": {"type": "delta_net", **_TWO_HEADS},
    "gated_delta_net": {"type": "gated_delta_net", **_TWO_HEADS},
    "kda": {"type": "kda", **_TWO_HEADS},
    "mom": {"type": "mom", **_TWO_HEADS},
    "hgrn2": {"type": "hgrn2", **_TWO_HEADS},
    "mamba": _MAMBA,
    "mamba2": {"type": "mamba2", "inner_dim": "2*width", "head_dim": "min(64, width)", "state_dim": 16},
    "rwkv4": {"type": "rwkv4", "input_dim": "width", "inner_dim": "width"},
    "rwkv5": {"type": "rwkv5", **_RWKV, "value_dim": "min(64, width)"},
    "rwkv6": {"type": "rwkv6", **_RWKV, "value_dim": "min(64, width)"},
    "rwkv7": {"type": "rwkv7", **_RWKV, "value_dim": "min(64, width)"},
    "base_conv": {
        CYCLE: [
            {"type": "base_conv", "channels": "width", "kernel": 3, "max_length": "length"},
            {"type": "base_conv", "channels": "width", "kernel": "length", "max_length": "length"},
        ]
    },
    "h3": {"type": "h3", "num_heads": "width/2", "head_dim": 2, "state_dim": "length"},
    "hyena": {"type": "hyena", "inner_dim": "width", "max_length": "length"},
    "attention": _ATTENTION,
    "hymba": {"type": "hymba", "attention": _ATTENTION, "ssm": _MAMBA},
}
"""Sizes of each mixer at width d and sequence length L.

The settings of zoology's second figure where it has the mixer: attention with one head, BaseConv that alternates 3 taps
with L, H3 with a state of L and heads of 2, Hyena over L, RWKV-4 as wide inside as outside, Mamba as published (expand
2, state 16, rank d/16). Mamba-2 has Mamba's state of 16 a channel, later RWKVs heads of 64, or of d where that is less.
GLA and RetNet have the published ratios of key and value width (1/2 and 1; 1 and 2) in two heads, and the delta rules
two heads as well.
"""


def sized(mixer: str | Mapping[str, Any], width: int, length: int | None = None, layer: int = 0) -> dict[str, Any]:
    """Return the description of `mixer` for layer `layer` of models of this width, trained on this many tokens.

    A name takes the sizes of `DEFAULTS`. In a description every text such as ``width``, ``2*width``, ``width/4``,
    ``length``, ``min(64, width)`` and ``max(1, width/64)`` becomes a number, also in nested descriptions. A division
    that leaves a rest is an error, but inside of min and max it is rounded down.

    Raises:
        UserError: an unknown name, text that is no size, or a division that leaves a rest.
    """
    if isinstance(mixer, str):
        if mixer not in DEFAULTS:
            raise UserError(
                f'no default sizes for the mixer "{mixer}"; there are some for {", ".join(DEFAULTS)}.'
                f"{did_you_mean(mixer, DEFAULTS)} Or describe it: {{type: {mixer}, ...}}"
            )
        mixer = DEFAULTS[mixer]
    if CYCLE in mixer:
        return sized(mixer[CYCLE][layer % len(mixer[CYCLE])], width, length)
    lengths = {"width": width} | ({} if length is None else {"length": length})
    return {key: _resolve(value, lengths, key) for key, value in mixer.items() if key != "label"}


def _resolve(value: Any, lengths: Mapping[str, int], where: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolve(item, lengths, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve(item, lengths, where) for item in value]
    if not isinstance(value, str) or not any(name in value for name in lengths):
        return value
    text = value.strip()
    if match := _COMPARED.fullmatch(text):
        choose = min if match[1] == "min" else max
        return choose(int(match[2]), _share(match[3].strip(), lengths, where, rounded=True))
    return _share(text, lengths, where, rounded=False)


def _share(text: str, lengths: Mapping[str, int], where: str, rounded: bool) -> int:
    match = _SHARE.fullmatch(text)
    if match is None or match[2] not in lengths or int(match[3] or 1) == 0:
        raise UserError(f'{where}: "{text}" is not a size; write it like width, 2*width, width/4 or min(64, width)')
    product, divisor = int(match[1] or 1) * lengths[match[2]], int(match[3] or 1)
    if product % divisor and not rounded:
        raise UserError(f'{where}: "{text}" is not a whole number at {match[2]} {lengths[match[2]]}')
    return product // divisor


def label(mixer: str | Mapping[str, Any]) -> str:
    """Return the short name of a mixer in tables: its label or its type, with what a description says beyond it."""
    if isinstance(mixer, str):
        return mixer
    if mixer.get("label"):
        return str(mixer["label"])
    if CYCLE in mixer:
        return "/".join(map(label, mixer[CYCLE]))
    sizes = " ".join(f"{key}={_short(value)}" for key, value in mixer.items() if key != "type")
    return f"{mixer['type']} {sizes}".strip()


def _short(value: Any) -> str:
    return label(value) if isinstance(value, Mapping) and ("type" in value or CYCLE in value) else str(value)
