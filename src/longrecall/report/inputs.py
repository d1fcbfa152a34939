"""Reading result files into checked values, each with a label of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.evaluation.results import SCHEMA, check_result, read_json
from longrecall.files import printable
from longrecall.report.diagnoses import Diagnosis, parse_diagnosis
from longrecall.report.sweeps import Sweep, parse_sweep
from longrecall.tasks.registry import declaration_of

_VERB_OF = {"evaluation": "eval", "training": "train", "diagnosis": "diagnose", "sweep": "sweep"}
KINDS = tuple(_VERB_OF)


@dataclass(frozen=True)
class Measurement:
    """One number with its 95% interval; None where there is none (a diverged model, a single window).

    `cell` says where it was measured; `count` is the number of answers or tokens behind it.
    """

    task: str
    cell: Mapping[str, Any]
    metric: str
    value: float | None
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Evaluation:
    """An evaluation file: `data` as it was read, its measurements, and the label that the report calls it."""

    label: str
    source: str
    data: Mapping[str, Any]
    measurements: tuple[Measurement, ...]

    def of(self, task: str, metric: str) -> tuple[Measurement, ...]:
        """Return the measurements of one metric of one task, in the file's order."""
        return tuple(m for m in self.measurements if m.task == task and m.metric == metric)


@dataclass(frozen=True)
class Training:
    """A training file: `log` holds one mapping per logged step, with at least a step and a finite loss."""

    label: str
    source: str
    data: Mapping[str, Any]
    log: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Inputs:
    """Everything that a report is made of, in the order in which the files were given."""

    evaluations: tuple[Evaluation, ...]
    trainings: tuple[Training, ...]
    diagnoses: tuple[Diagnosis, ...] = ()
    sweeps: tuple[Sweep, ...] = ()

    @property
    def labels(self) -> list[str]:
        """Every label once, in the order that gives each its colour, marker and line; sweeps have none of these."""
        entries: list[Evaluation | Training | Diagnosis] = [*self.evaluations, *self.diagnoses, *self.trainings]
        return list(dict.fromkeys(entry.label for entry in entries))


def read_inputs(paths: Sequence[str | Path], labels: Mapping[str, str] | None = None) -> Inputs:
    """Read result files; `labels` maps a label to one of `paths` and wins over the file's own "label".

    Raises:
        UserError: no file, a missing or broken file, an unknown schema or kind, a label for a file that is not
            among `paths`, or the same label twice.
    """
    if not paths:
        raise UserError(
            "a report needs at least one result file; eval --out, diagnose --out, train and sweep write them"
        )
    chosen = _labels_by_file(paths, labels or {})
    evaluations: list[Evaluation] = []
    trainings: list[Training] = []
    diagnoses: list[Diagnosis] = []
    sweeps: list[Sweep] = []
    for path in paths:
        data = read_json(path)
        source = printable(path)
        kind = _kind(data, source)
        _check_mappings(data, source)
        label = _label(data, path, chosen, [*evaluations, *trainings, *diagnoses, *sweeps])
        if kind == "evaluation":
            check_result(data, source)
            evaluations.append(Evaluation(label, source, data, _measurements(data, source)))
        elif kind == "diagnosis":
            diagnoses.append(parse_diagnosis(data, source, label))
        elif kind == "sweep":
            sweeps.append(parse_sweep(data, source, label))
        else:
            trainings.append(Training(label, source, data, _log(data, source)))
    return Inputs(tuple(evaluations), tuple(trainings), tuple(diagnoses), tuple(sweeps))


def _labels_by_file(paths: Sequence[str | Path], labels: Mapping[str, str]) -> dict[Path, str]:
    known = {Path(path).resolve(): str(path) for path in paths}
    if len(known) != len(paths):
        raise UserError("a result file is given twice; give it once")
    chosen: dict[Path, str] = {}
    for label, file in labels.items():
        place = Path(file).resolve()
        if place not in known:
            hint = did_you_mean(file, known.values())
            raise UserError(f"--label {label}={file}: {file} is not among the result files given.{hint}")
        if place in chosen:
            raise UserError(f"--label {label}={file}: {file} already has the label {chosen[place]}; give it one")
        chosen[place] = label
    return chosen


def _kind(data: Mapping[str, Any], source: str) -> str:
    schema, kind = data.get("schema"), data.get("kind")
    if schema != SCHEMA:
        raise UserError(f"{source}: schema {schema!r} is not {SCHEMA}; it is no result file, or of another version")
    if kind not in KINDS:
        raise UserError(f"{source}: kind {kind!r} is none of {', '.join(KINDS)}.{did_you_mean(str(kind), KINDS)}")
    return str(kind)


def _check_mappings(data: Mapping[str, Any], source: str) -> None:
    """What every kind may have, and the page shows as it stands."""
    for key in ("recipe", "settings", "environment", "checkpoint"):
        if not isinstance(data.get(key, {}), dict):
            raise UserError(f'{source}: "{key}" is missing or not a dict; run {_VERB_OF[data["kind"]]} again')
    records = data.get("checkpoint", {}).get("surgery") or []
    listed = isinstance(records, list) and all(isinstance(record, dict) for record in records)
    if not listed or not all(isinstance(record.get("layers", []), list) for record in records):
        raise UserError(f'{source}: "surgery" is no list of records with layers; run {_VERB_OF[data["kind"]]} again')


def _label(
    data: Mapping[str, Any],
    source: str | Path,
    chosen: Mapping[Path, str],
    earlier: Sequence[Evaluation | Training | Diagnosis | Sweep],
) -> str:
    place = Path(source).resolve()
    taken = {entry.label: entry.source for entry in earlier if entry.data["kind"] == data["kind"]}
    own = chosen.get(place) or data.get("label")
    if isinstance(own, str) and own.strip():
        own = printable(own)
        if own in taken:
            raise UserError(f'{source} and {taken[own]} have the same label "{own}"; rename one: --label NAME=FILE')
        return own
    # before.json of two runs: the folder tells them apart.
    for name in (printable(place.stem), printable(f"{place.parent.name}/{place.stem}")):
        if name not in taken:
            return name
    raise UserError(f"{source} and another file would have the same label; name them: --label NAME=FILE")


def _measurements(data: Mapping[str, Any], source: str) -> tuple[Measurement, ...]:
    for index, entry in enumerate(data["results"]):
        part = declaration_of(str(entry["task"])).report
        for key in part.numbers if part is not None else ():
            number = entry["cell"].get(key)
            if isinstance(number, bool) or not isinstance(number, int | float) or not _is_small(number):
                raise UserError(f'{source}: results[{index}] has no number "{key}" in its cell; run eval again')
        for key in part.texts if part is not None else ():
            if not isinstance(entry["cell"].get(key), str):
                raise UserError(f'{source}: results[{index}] has no name "{key}" in its cell; run eval again')
    return tuple(map(_measurement, data["results"]))


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    value, low, high = (_finite(entry.get(key)) for key in ("value", "low", "high"))
    cell = {str(key): number for key, number in entry["cell"].items()}
    return Measurement(entry["task"], cell, entry["metric"], value, low, high, entry["count"])


def _is_small(number: float) -> bool:
    """Whether a number is finite and fits a double, which plots are drawn with; whole numbers of JSON may not."""
    return abs(number) <= sys.float_info.max


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None


def _log(data: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], ...]:
    log = data.get("log")
    if not isinstance(log, list) or not all(isinstance(row, dict) for row in log):
        raise UserError(f'{source}: "log" is missing or not a list of objects; run train again')
    rows = [row for row in log if "loss" in row]
    for index, row in enumerate(rows):
        for key in ("step", "loss"):
            if isinstance(row.get(key), bool) or not isinstance(row.get(key), int | float):
                raise UserError(f'{source}: log[{index}] has no valid "{key}"; run train again')
    return tuple(row for row in rows if math.isfinite(row["loss"]))
