"""Diagnosis files as checked values: what `longrecall diagnose` found, each part as points of a curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError

STATISTICS = ("std", "norm", "effective_rank")
"""Numbers of a head's state that the report shows."""


@dataclass(frozen=True)
class Point:
    """A value at `place` (tokens) with its 95% interval; None where the model diverged or nothing is known."""

    place: float
    value: float | None
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Span:
    """Loss at token positions [start, end): nats per token; `bits_per_byte` is None where tokens have no bytes."""

    start: int
    end: int
    loss: Point
    bits_per_byte: float | None


@dataclass(frozen=True)
class LayerState:
    """Statistics of one layer's recurrent state: name -> heads -> one value per position of the diagnosis."""

    layer: int
    mixer: str
    ceiling: int
    """The largest rank that a head's state can have: min(K, V)."""
    heads: Mapping[str, tuple[tuple[float | None, ...], ...]]


@dataclass(frozen=True)
class Finding:
    """One finding of the verdict, as diagnose wrote it."""

    name: str
    text: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """A diagnosis file: `data` as it was read, its parts, and the label that the report calls it.

    A part that was not run is empty. `remembrance_length` is T of EffRem_T(t), whose points stand at t; those of
    `recall` stand at lengths, and `maximum` is threshold -> the longest length that still reaches it (None: none does),
    `maximum_intervals` threshold -> the least and the most that it may be; empty in files of older versions.
    """

    label: str
    source: str
    data: Mapping[str, Any]
    training_length: int
    losses: tuple[Span, ...]
    positions: tuple[int, ...]
    layers: tuple[LayerState, ...]
    remembrance_length: int
    remembrance: tuple[Point, ...]
    recall: tuple[Point, ...]
    maximum: Mapping[str, int | None]
    maximum_intervals: Mapping[str, tuple[int | None, int | None]]
    verdict: tuple[Finding, ...]


def parse_diagnosis(data: Mapping[str, Any], source: str, label: str) -> Diagnosis:
    """Return the values of a diagnosis file; raise `UserError` that names the key that is missing or no such value."""
    _part(data, "checkpoint", dict, source, "")
    settings = _part(data, "settings", dict, source, "")
    training_length = _whole(settings, "training_length", source, "settings.")
    if training_length < 1:
        raise _wrong(source, "settings.training_length")
    state = _optional(data, "state", dict, source) or {}
    remembrance = _optional(data, "remembrance", dict, source) or {}
    recall = _optional(data, "recall", dict, source) or {}
    positions = _positions(state, source) if state else ()
    layers = _rows(state, "layers", source, "state.") if state else []
    left_out = _points(remembrance, "t", source, "remembrance.")
    return Diagnosis(
        label=label,
        source=source,
        data=data,
        training_length=training_length,
        losses=_losses(data, source),
        positions=positions,
        layers=tuple(
            _layer(row, source, f"state.layers[{index}].", len(positions)) for index, row in enumerate(layers)
        ),
        remembrance_length=_whole(remembrance, "length", source, "remembrance.") if left_out else 0,
        remembrance=left_out,
        recall=_points(recall, "length", source, "recall."),
        maximum=_maximum(recall, source),
        maximum_intervals=_maximum_intervals(recall, source),
        verdict=_verdict(data, source),
    )


def _positions(state: Mapping[str, Any], source: str) -> tuple[int, ...]:
    places = _part(state, "positions", list, source, "state.")
    return tuple(_whole({"positions": place}, "positions", source, "state.") for place in places)


def _losses(data: Mapping[str, Any], source: str) -> tuple[Span, ...]:
    spans = []
    for index, row in enumerate(_optional(data, "perplexity", list, source) or []):
        where = f"perplexity[{index}]."
        row = _object(row, source, where)
        start, end = (_whole(row, key, source, where) for key in ("start", "end"))
        if not 0 <= start < end:
            raise _wrong(source, f"{where}end")
        # The middle on a logarithmic axis, which has no 0: the first range stands at half its end.
        point = _point(row, math.sqrt(max(start, end / 4) * end), "loss", source, where)
        spans.append(Span(start, end, point, _number(row, "bits_per_byte", source, where)))
    return tuple(spans)


def _layer(row: Mapping[str, Any], source: str, where: str, places: int) -> LayerState:
    heads = _rows(row, "heads", source, where)
    statistics: dict[str, tuple[tuple[float | None, ...], ...]] = {}
    for name in STATISTICS:
        curves = []
        for index, head in enumerate(heads):
            curve = _numbers(head, name, source, f"{where}heads[{index}].")
            if len(curve) != places:
                raise UserError(
                    f"{source}: {where}heads[{index}].{name} has {len(curve)} values for {places} positions; "
                    "run diagnose again"
                )
            curves.append(tuple(curve))
        statistics[name] = tuple(curves)
    ceiling = min(_whole(row, key, source, where) for key in ("key_dim", "value_dim"))
    if ceiling < 1:
        raise _wrong(source, f"{where}key_dim")
    return LayerState(_whole(row, "layer", source, where), str(row.get("mixer", "")), ceiling, statistics)


def _points(part: Mapping[str, Any], key: str, source: str, where: str) -> tuple[Point, ...]:
    if not part:
        return ()
    points = []
    for index, row in enumerate(_rows(part, "points", source, where)):
        inside = f"{where}points[{index}]."
        points.append(_point(row, _whole(row, key, source, inside), "value", source, inside))
    return tuple(sorted(points, key=lambda point: point.place))


def _maximum(recall: Mapping[str, Any], source: str) -> dict[str, int | None]:
    found = recall.get("maximum") or {}
    if not isinstance(found, dict):
        raise _wrong(source, "recall.maximum")
    return {str(key): _whole_or_none(found, key, source, "recall.maximum.") for key in found}


def _maximum_intervals(recall: Mapping[str, Any], source: str) -> dict[str, tuple[int | None, int | None]]:
    found = recall.get("maximum_intervals") or {}
    if not isinstance(found, dict) or any(not isinstance(ends, list) or len(ends) != 2 for ends in found.values()):
        raise _wrong(source, "recall.maximum_intervals")
    where = "recall.maximum_intervals."
    ends = {key: [_whole_or_none({key: end}, key, source, where) for end in found[key]] for key in found}
    return {str(key): (low, high) for key, (low, high) in ends.items()}


def _verdict(data: Mapping[str, Any], source: str) -> tuple[Finding, ...]:
    findings = []
    for index, row in enumerate(_optional(data, "verdict", list, source) or []):
        row = _object(row, source, f"verdict[{index}].")
        for key in ("finding", "text", "advice"):
            if not isinstance(row.get(key), str):
                raise _wrong(source, f"verdict[{index}].{key}")
        findings.append(Finding(row["finding"], row["text"], row["advice"]))
    return tuple(findings)


def _point(row: Mapping[str, Any], place: float, key: str, source: str, where: str) -> Point:
    value, low, high = (_number(row, name, source, where) for name in (key, "low", "high"))
    return Point(place, value, low, high, _whole(row, "count", source, where))


def _wrong(source: str, place: str) -> UserError:
    return UserError(f"{source}: {place} is missing or not what diagnose writes there; run diagnose again")


def _part(data: Mapping[str, Any], key: str, kind: type, source: str, where: str) -> Any:
    if not isinstance(data.get(key), kind):
        raise _wrong(source, f"{where}{key}")
    return data[key]


def _optional(data: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    return None if data.get(key) is None else _part(data, key, kind, source, "")


def _object(row: Any, source: str, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise _wrong(source, where.rstrip("."))
    return row


def _rows(part: Mapping[str, Any], key: str, source: str, where: str) -> Sequence[Mapping[str, Any]]:
    rows = _part(part, key, list, source, where)
    return [_object(row, source, f"{where}{key}[{index}]") for index, row in enumerate(rows)]


def _whole(row: Mapping[str, Any], key: str, source: str, where: str) -> int:
    if isinstance(row.get(key), bool) or not isinstance(row.get(key), int):
        raise _wrong(source, f"{where}{key}")
    return int(row[key])


def _whole_or_none(row: Mapping[str, Any], key: str, source: str, where: str) -> int | None:
    return None if row.get(key) is None else _whole(row, key, source, where)


def _number(row: Mapping[str, Any], key: str, source: str, where: str) -> float | None:
    """Return a number, None for null and for NaN and infinity, which plain JSON cannot say; the key must be there."""
    if key not in row or not _is_number(row[key]):
        raise _wrong(source, f"{where}{key}")
    return _finite(row[key])


def _numbers(row: Mapping[str, Any], key: str, source: str, where: str) -> list[Any]:
    values = _part(row, key, list, source, where)
    if not all(_is_number(value) for value in values):
        raise _wrong(source, f"{where}{key}")
    return [_finite(value) for value in values]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
