"""How configs of transformers say by which angles queries and keys turn, in all the spellings that it reads.

Files of today have one mapping `rope_parameters`; older ones `rope_theta`, `rope_scaling` and `partial_rotary_factor`
beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.rotary import DYNAMIC, LLAMA3, LONGROPE, YARN, RopeScaling
from longrecall.models.formats.fields import Fields

THETA = 10000.0
"""What transformers takes where a file says nothing."""
_SECTIONS = ("mrope_section", "mrope_interleaved")
"""Which channels turn by the place in an image. Text has one position for all of them."""


def read_rotary(fields: Fields, context: int | None, *, share: float = 1.0) -> dict[str, Any]:
    """Return the fields of an `attention` description that say how it turns; no theta (null) means not at all.

    Args:
        fields: the config.
        context: its `max_position_embeddings`.
        share: of a head's channels that turn, where the file says nothing.

    Raises:
        UserError: a value that cannot be, or a way to stretch the angles that longrecall does not know.
    """
    given = dict(_mapping(fields, "rope_scaling") or _mapping(fields, "rope_parameters"))
    theta = given.pop("rope_theta", fields.get("rope_theta", THETA))
    share = given.pop("partial_rotary_factor", fields.get("partial_rotary_factor", share))
    kind, old_kind = given.pop("rope_type", None), given.pop("type", None)
    kind = kind or old_kind or "default"
    for name in _SECTIONS:
        given.pop(name, None)
    if theta is None:
        return {"rotary_share": 0.0}
    share = 1.0 if share is None else share
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", share)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(f'{fields.where}: "{name}" is {value!r}; it must be a number > 0')
    found = {"rope_theta": float(theta), "rotary_share": float(share)}
    if kind == "default":
        if given:
            raise UserError(
                f'{fields.where}: the rotary embedding has a "{min(given)}", but its "rope_type" is default'
            )
        return found
    if kind in (YARN, LONGROPE, LLAMA3):
        given.setdefault("original_max_position_embeddings", context)
    if kind == DYNAMIC or (kind in (YARN, LONGROPE) and given.get("factor") is None):
        given.setdefault("max_position_embeddings", context)
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return {**found, "rope_scaling": RopeScaling.from_dict({"rope_type": kind, **known}).to_dict()}
    except UserError as error:
        raise UserError(f"{fields.where}: {error}") from None


def rotary_fields(
    attention: Mapping[str, Any] | None, kept: Mapping[str, Any], context: int | None, *, share: float = 1.0
) -> dict[str, Any]:
    """Return the fields of a config that say how an `attention` turns: the inverse of `read_rotary`.

    Empty where `kept`, the config that the model was read from, says the same already, or no layer attends (None).
    """
    if attention is None:
        return {}
    names = ("rope_theta", "rotary_share", "rope_scaling")
    defaults = {"rope_theta": THETA, "rotary_share": 1.0, "rope_scaling": None}
    wanted = {name: attention.get(name, defaults[name]) for name in names}
    turns = bool(wanted["rotary_share"])
    if kept:
        said = {**defaults, **read_rotary(Fields(dict(kept), ""), context, share=share)}
        if said == wanted or not (turns or said["rotary_share"]):
            return {}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": wanted["rope_theta"] if turns else None}
    if turns and (wanted["rotary_share"] != 1 or share != 1):
        parameters["partial_rotary_factor"] = wanted["rotary_share"]
    parameters |= wanted["rope_scaling"] or {}
    # `rope_scaling` would have the last word.
    return {"rope_parameters": parameters, **({"rope_scaling": None} if "rope_scaling" in kept else {})}


def _mapping(fields: Fields, name: str) -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(name, "it must be a mapping, or null")
    return value
