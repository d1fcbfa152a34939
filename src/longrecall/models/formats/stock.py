"""Helps to write the config.json of a stock model, and proves it by reading it back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.fields import plain_number
from longrecall.models.formats.format import Format
from longrecall.models.formats.layout import Layout
from longrecall.models.sizes import PlainConfig

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_COMPARED = frozenset({"initializer_range", "context_length", "residual_in_fp32"})
"""What changes no output in float32, and what some stock configs have no key for."""


def stock_layout(form: Format, plain: PlainConfig, kept: dict[str, Any]) -> tuple[dict[str, Any], Layout]:
    """Return the config.json that describes a native model as one of `form`, and how that is read.

    Args:
        form: a format that has a `stock_config`.
        plain: the native model.
        kept: the config.json of this format that it was once read from; {} where there is none.

    Raises:
        UserError: the stock model cannot be this one; the line says which layer or field does not fit.
    """
    assert form.stock_config is not None
    raw = form.stock_config(plain, kept)
    found = form.layout(raw, f"config.json of {form.name}")
    wanted = {name: value for name, value in _comparable(plain).items() if name not in _NOT_COMPARED}
    difference = first_difference(wanted, _comparable(found.plain))
    if difference is not None:
        place, ours, theirs = difference
        raise UserError(f"{place} is {shown(ours)} here, and would be {shown(theirs)} in a model of {form.name}")
    return raw, found


def first_difference(wanted: Any, found: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Return where two configs first differ, and both values there; None where `found` says all that `wanted` does."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        keys = [*wanted, *(key for key in found if key not in wanted and place)]
        pairs = [(f"{place}.{key}" if place else str(key), wanted.get(key), found.get(key)) for key in keys]
    elif isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        if len(wanted) != len(found):
            return f"the number of {place}", len(wanted), len(found)
        each = zip(wanted, found, strict=True)
        inside = "layer {}" if place == "layers" else place + "[{}]"
        pairs = [(inside.format(index), ours, theirs) for index, (ours, theirs) in enumerate(each)]
    else:
        return None if wanted == found else (place, wanted, found)
    return next((found for pair in pairs if (found := first_difference(pair[1], pair[2], pair[0])) is not None), None)


def merged(kept: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that was read with the `fields` that it has to say now; unchanged values stay as written.

    A field that is None, and that `kept` does not have either, is left out.
    """
    result = dict(kept)
    for key, value in fields.items():
        if key in kept and plain_values(kept[key]) == plain_values(value):
            continue
        if value is not None or key in kept or (not kept and key in _TOKENS):
            result[key] = value
    return result


def plain_values(value: Any) -> Any:
    """Return a value of a config.json with infinities as floats and pairs as lists, so that spellings compare equal."""
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    number = plain_number(value)
    return {key: plain_values(item) for key, item in number.items()} if isinstance(number, dict) else number


def json_number(value: float | None) -> object:
    """Return a number as transformers writes it into JSON, which has no infinity; None means infinity."""
    if value is None or value == math.inf:
        return {"__float__": "Infinity"}
    return value


def whole(value: float) -> float:
    """Return a number without a fraction as an int: stock configs want ``"expand": 2``, not 2.0."""
    return int(value) if value == int(value) else value


def expansion(kept: Mapping[str, Any], key: str, width: int, hidden_size: int) -> float:
    """Return the factor that makes `width` of `hidden_size`: as it was written, where that says the same."""
    old = kept.get(key)
    if isinstance(old, int | float) and round(hidden_size * old) == width:
        return old
    return whole(width / hidden_size)


def common_fields(plain: PlainConfig, *, context: str | None = "max_position_embeddings") -> dict[str, Any]:
    """Return the fields that most stock configs share: sizes of the whole model, token ids, the context's length.

    `context`: what the format calls the length of the context; None = it has no such field.
    """
    return {
        "vocab_size": plain.vocab_size,
        "hidden_size": plain.hidden_size,
        "num_hidden_layers": len(plain.layers),
        "tie_word_embeddings": plain.tie_word_embeddings,
        **{name: plain.more.get(name) for name in _TOKENS},
        **({} if context is None else {context: plain.context_length}),
    }


def first_module(plain: PlainConfig, kind: str) -> dict[str, Any]:
    """Return the first module of type `kind` in any layer; the others are compared when the config is read back.

    Raises:
        UserError: there is none.
    """
    found = find_module(plain, kind)
    if found is not None:
        return found
    kinds = sorted({str(module.get("type")) for layer in plain.layers for module in modules(layer)})
    raise UserError(f'no layer of this model has a "{kind}" (there are: {", ".join(kinds)})')


def find_module(plain: PlainConfig, kind: str) -> dict[str, Any] | None:
    """Return the first module of type `kind` in any layer; None where there is none."""
    every = (module for layer in plain.layers for module in modules(layer))
    return next((dict(module) for module in every if module.get("type") == kind), None)


def modules(layer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the modules of a plain layer description in their order, whichever of its two forms it has."""
    if "blocks" in layer:
        return [block["module"] for block in layer["blocks"]]
    mlp = [{"type": "mlp", "inner_size": layer["mlp_size"]}] if layer["mlp_size"] else []
    return [layer["mixer"], *mlp]


def shown(value: Any) -> str:
    """Return a value of a config for an error of one line."""
    if value is None:
        return "not set"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _comparable(plain: PlainConfig) -> dict[str, Any]:
    return {name: getattr(plain, name) for name in sorted(PlainConfig.names())}
