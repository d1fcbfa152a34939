"""How transformers' configs say by which angles attention turns its heads: read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.descriptions.rotary import DYNAMIC, KINDS, LLAMA3, LONGROPE, YARN, RopeScaling, fields_of
from longrecall.models.formats.fields import Fields

PLAIN = "default"
OF_PICTURES = ("mrope_section", "mrope_interleaved")
"""Where positions of pictures go. In text they are the position itself, so that nothing changes."""


def read_rope(
    fields: Fields, *, theta: float = 10000.0, share: float = 1.0, plain_share: bool = True
) -> dict[str, Any]:
    """The fields `rope_theta`, `rotary_share` and `rope_scaling` of an attention layer.

    They are under `rope_parameters`, or under the keys of older files: `rope_scaling`, `rope_theta` and
    `partial_rotary_factor` of the config itself. A `rope_theta` of null stands for no positions at all (Olmo).

    Args:
        fields: the config.
        theta: where the config has none.
        share: of a head's channels, where the config has none.
        plain_share: whether the family's code looks at the share where no angle is stretched; some families' does not.

    Raises:
        UserError: an unknown kind of scaling, or a value that cannot be.
    """
    older = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    length, original = fields.get("max_position_embeddings"), fields.get("original_max_position_embeddings")
    named = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise fields.fail(named, "it must be a mapping")
    own = Fields(dict(given), f'{fields.where}: "{named}"')
    own.ignore("type", "rope_type", *OF_PICTURES, *(name for kind in KINDS for name in fields_of(kind)))
    kind = own.get("rope_type", own.get("type", PLAIN))
    if "rope_theta" in given and given["rope_theta"] is None:
        own.ignore("rope_theta", "partial_rotary_factor")
        own.finish()
        return {"rotary_share": 0.0}
    found: dict[str, Any] = {
        "rope_theta": own.number(
            "rope_theta", theta if older["rope_theta"] is None else fields.number("rope_theta", 0)
        ),
        "rotary_share": _share(own, share if older["partial_rotary_factor"] is None else _share(fields, share)),
        "rope_scaling": None,
    }
    own.finish()
    if kind == PLAIN:
        return found if plain_share else found | {"rotary_share": 1.0}
    if kind not in KINDS:
        raise own.fail(
            "rope_type" if "rope_type" in given else "type", f"longrecall reads only {', '.join((PLAIN, *KINDS))}"
        )
    values = {name: given[name] for name in fields_of(kind) if given.get(name) is not None}
    if kind in (YARN, LONGROPE, LLAMA3):
        before = values.get("original_max_position_embeddings", length) if original is None else original
        values["original_max_position_embeddings"] = before
    if kind == DYNAMIC or (kind in (YARN, LONGROPE) and values.get("factor") is None):
        values["max_position_embeddings"] = length
    else:
        values.pop("max_position_embeddings", None)
    try:
        found["rope_scaling"] = RopeScaling.from_dict({**values, "rope_type": kind}).to_dict()
    except UserError as error:
        raise UserError(f"{fields.where}: {error}") from None
    return found


def _share(fields: Fields, default: float) -> float:
    share = fields.number("partial_rotary_factor", default)
    if share > 1:
        raise fields.fail("partial_rotary_factor", "it must be at most 1")
    return share


def rope_parameters(config: AttentionConfig) -> dict[str, Any]:
    """The inverse of `read_rope`: `rope_parameters` of an attention layer.

    `max_position_embeddings` is none of them: where angles are stretched by it, it is the config's own.
    """
    if not config.rotary_share:
        return {"rope_type": PLAIN, "rope_theta": None}
    scaling = {"rope_type": PLAIN} if config.rope_scaling is None else config.rope_scaling.to_dict()
    scaling.pop("max_position_embeddings", None)
    share = {"partial_rotary_factor": config.rotary_share} if config.rotary_share != 1 else {}
    return {**scaling, "rope_theta": config.rope_theta, **share}


def written_rope(module: Mapping[str, Any], kept: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """The keys of a config that say the rotation of an attention layer; none where `kept` says it already.

    Args:
        module: the plain description of the layer.
        kept: the config that the model was read from, or {}.
        how: what `read_rope` is called with in this format.
    """
    attention = AttentionConfig.from_dict({key: value for key, value in module.items() if key != "type"})
    if kept:
        said = {**module, **read_rope(Fields(dict(kept), "config.json"), **how)}
        if AttentionConfig.from_dict({key: value for key, value in said.items() if key != "type"}) == attention:
            return {}
    older = {name: None for name in ("rope_theta", "rope_scaling", "partial_rotary_factor") if name in kept}
    share = {"partial_rotary_factor": attention.rotary_share} if attention.rotary_share else {}
    return {**older, "rope_parameters": {**share, **rope_parameters(attention)}}
