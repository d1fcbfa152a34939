"""Sweep files as checked values: the runs that `longrecall sweep` trained, and what to call their models and cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError
from longrecall.tasks.published import (
    RESONA_LENGTHS,
    RESONA_TABLE_1,
    RESONA_TABLE_11,
    RESONA_TABLE_11_WITH_RETRIEVAL,
    RESONA_WIDTHS,
)

_DEFAULT_METRIC = "accuracy"
_PUBLISHED_MIXERS = {"rwkv4": "rwkv", "rwkv5": "rwkv"}
"""Our name -> the name in table 11, where they differ."""
_PUBLISHED_LAYERS = 4


@dataclass(frozen=True)
class Sweep:
    """A sweep file: `data` as it was read, its rows, the metric that it compares, and the report's label for it.

    Each row has ``task``, ``settings``, ``model`` (``mixer``, ``hidden_size``, ``layers``, ``retrieval``, ...),
    ``learning_rate``, ``weight_decay``, ``status`` and the metric, a share or None.
    """

    label: str
    source: str
    data: Mapping[str, Any]
    metric: str
    rows: tuple[Mapping[str, Any], ...]


def parse_sweep(data: Mapping[str, Any], source: str, label: str) -> Sweep:
    """Return the values of a sweep file; raise `UserError` that names the key that is missing or no such value."""
    recipe = data.get("recipe")
    training = recipe.get("training") if isinstance(recipe, Mapping) else None
    metric = training.get("metric") if isinstance(training, Mapping) else None
    metric = metric if isinstance(metric, str) else _DEFAULT_METRIC
    rows = data.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{source}: "rows" is missing or not a list of objects; run sweep again')
    for index, row in enumerate(rows):
        _check_row(row, metric, f"{source}: rows[{index}]")
    return Sweep(label, source, data, metric, tuple(rows))


def _check_row(row: Mapping[str, Any], metric: str, place: str) -> None:
    model = row.get("model")
    model = model if isinstance(model, dict) else {}
    sound = {
        "task": isinstance(row.get("task"), str),
        "status": isinstance(row.get("status"), str),
        "settings": isinstance(row.get("settings"), dict),
        "model.mixer": isinstance(model.get("mixer"), str),
        "model.hidden_size": _is_number(model.get("hidden_size")),
        "model.layers": _is_number(model.get("layers")),
        "model.retrieval": isinstance(model.get("retrieval"), dict | None),
        "learning_rate": _is_number(row.get("learning_rate")),
        "weight_decay": _is_number(row.get("weight_decay")),
        metric: row.get(metric) is None or (_is_number(row.get(metric)) and 0 <= row[metric] <= 1),
    }
    for key, fine in sound.items():
        if not fine:
            raise UserError(f'{place} has no valid "{key}"; run sweep again')


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def retrieval_layers(model: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers of a row's model that have retrieval."""
    layer = (model["retrieval"] or {}).get("layer", ())
    return tuple(layer) if isinstance(layer, list | tuple) else (layer,)


def model_names(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each model, its width left out: ``gla+R0`` has retrieval in layer 0.

    What is not the same in all of them stands behind it.
    """
    flat = [
        {key: value for key, value in model.items() if key not in ("mixer", "hidden_size", "retrieval")}
        | {f"retrieval {key}": value for key, value in (model["retrieval"] or {}).items() if key != "layer"}
        for model in models
    ]
    parts = _differing(flat)
    return [
        " ".join([model["mixer"] + "".join(f"+R{layer}" for layer in retrieval_layers(model)), *part])
        for model, part in zip(models, parts, strict=True)
    ]


def setting_names(settings: Sequence[Mapping[str, Any]], apart: Sequence[str] = ()) -> list[str]:
    """Return for each cell's settings what is not the same in all of them, `apart` left out; may be empty."""
    return [" ".join(part) for part in _differing([{k: v for k, v in s.items() if k not in apart} for s in settings])]


def _differing(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return for each entry ``key value`` of those keys that have several values (a missing key is none)."""
    keys = dict.fromkeys(key for entry in entries for key in entry)
    several = [key for key in keys if len({str(entry[key]) for entry in entries if key in entry}) > 1]
    return [[f"{key} {entry[key]}" for key in several if key in entry] for entry in entries]


def published_mqar(model: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """Return what table 11 of the RESONA paper reports for this model and cell; None where it reports nothing."""
    length, width = settings.get("length"), model["hidden_size"]
    mixer = _PUBLISHED_MIXERS.get(model["mixer"], model["mixer"])
    if length not in RESONA_LENGTHS or width not in RESONA_WIDTHS or settings.get("pairs") != length // 16:
        return None
    if mixer not in RESONA_TABLE_11 or model["layers"] != _PUBLISHED_LAYERS:
        return None
    layers = retrieval_layers(model)
    if layers:
        return RESONA_TABLE_11_WITH_RETRIEVAL if layers in ((0,), (2,)) else None
    return RESONA_TABLE_11[mixer][RESONA_LENGTHS.index(length)][RESONA_WIDTHS.index(width)]


def published_mad(mixer: str, with_retrieval: bool) -> tuple[float, ...] | None:
    """Return the six shares of table 1 of the RESONA paper, in the order of its columns; None where it has no row."""
    found = RESONA_TABLE_1.get(mixer)
    percent = found[int(with_retrieval)] if found is not None else None
    return None if percent is None else tuple(value / 100 for value in percent)
