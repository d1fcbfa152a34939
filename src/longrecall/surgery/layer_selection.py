"""Which layers a surgery touches: `every:M`, `first:N`, `all` or a list such as `0,6,12`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longrecall.errors import UserError

FORMS = "every:M, first:N, all, or a list such as 0,6,12"


def select_layers(
    selection: str | Iterable[int], layer_count: int, fitting: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the chosen layer indices, ascending.

    `fitting` are the layers that the surgery fits, None = all. Where `every`, `first` or `all` would take another one,
    as in a hybrid model, they count the fitting layers alone.

    `selection` is a text in one of four forms, or the indices themselves. `every:M` takes layers 0, M, 2M, ...: the
    uniform strategy of StateX, section 4.4, "expanding one layer every m consecutive layers, starting from the first".
    `layer_count` is the model's number of layers. Raises UserError for anything that is not exactly one choice of
    existing layers: an unknown form, M or N below 1, an index outside the model, an index named twice.
    """
    if not isinstance(selection, str):
        return _from_indices(list(selection), layer_count)
    text = selection.strip()
    every_layer = tuple(range(layer_count))
    form, colon, number = text.partition(":")
    if text != "all" and not (colon and form.strip() in ("every", "first")):
        return _from_indices([_whole(part, text) for part in text.split(",")], layer_count)
    count = 1 if text == "all" else _whole(number, text)
    chosen = _from_form("every" if text == "all" else form.strip(), count, text, every_layer)
    if not fitting or set(chosen) <= set(fitting):
        return chosen
    return _from_form("every" if text == "all" else form.strip(), count, text, tuple(fitting))


def _from_form(form: str, number: int, text: str, counted: tuple[int, ...]) -> tuple[int, ...]:
    if number < 1:
        raise UserError(f'layers "{text}": the number after "{form}:" must be at least 1')
    if form == "every":
        return counted[::number]
    if number > len(counted):
        raise UserError(
            f'layers "{text}": the model has only {len(counted)} layers for this; use first:{len(counted)} or all'
        )
    return counted[:number]


def _from_indices(indices: list[int], layer_count: int) -> tuple[int, ...]:
    if not indices:
        raise UserError(f"layers: nothing chosen; use {FORMS}")
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise UserError(f"layers: {index!r} is not a layer index; use {FORMS}")
        if not 0 <= index < layer_count:
            raise UserError(f"layers: {index} is out of range; the model's layers are 0 to {layer_count - 1}")
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise UserError(f"layers: {', '.join(map(str, twice))} named more than once; name each layer once")
    return tuple(sorted(indices))


def _whole(part: str, text: str) -> int:
    part = part.strip()
    # int() also takes 1_0 and other scripts' digits; a layer index is plain digits with an optional minus sign.
    if not (part.removeprefix("-").isascii() and part.removeprefix("-").isdigit()):
        raise UserError(f'layers "{text}": "{part}" is not a whole number; use {FORMS}')
    return int(part)
