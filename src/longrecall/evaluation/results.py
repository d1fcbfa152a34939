"""Result files, checked when read (docs/architecture.md, "Result files"); `longrecall.files` writes them."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longrecall.errors import UserError

SCHEMA = 1
CAPACITY_THRESHOLD = 0.9
_AVERAGED = {"passkey": ("length",), "copying": ("length",), "babilong": ("task", "length")}
"""Tasks whose accuracy is averaged over cells, and the parts of a cell by which it is averaged too."""


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise `UserError` when it is missing or no JSON object."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the result file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"the result file {path} is not JSON ({error}); run eval again") from error
    if not isinstance(data, dict):
        raise UserError(f"the result file {path} holds no JSON object; run eval again")
    return data


def read_result(path: str | Path) -> dict[str, Any]:
    """Return a checked evaluation result; raise `UserError` that names what is wrong with the file."""
    data = read_json(path)
    check_result(data, str(path))
    return data


_PARTS: dict[str, type] = {"checkpoint": dict, "settings": dict, "results": list, "summary": dict, "environment": dict}


def check_result(data: dict[str, Any], source: str) -> None:
    """Raise `UserError` unless `data` is an evaluation result of this schema; `source` names it in the message."""
    if data.get("schema") != SCHEMA:
        raise UserError(f"{source}: schema {data.get('schema')!r} is not {SCHEMA}; it was written by another version")
    if data.get("kind") != "evaluation":
        raise UserError(f'{source}: kind {data.get("kind")!r} is not "evaluation"; give a file that eval wrote')
    for key, kind in _PARTS.items():
        if not isinstance(data.get(key), kind):
            raise UserError(f'{source}: "{key}" is missing or not a {kind.__name__}; run eval again')
    for index, entry in enumerate(data["results"]):
        problem = _entry_problem(entry)
        if problem:
            raise UserError(f"{source}: results[{index}] {problem}; run eval again")


def _entry_problem(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "is not an object"
    for key, kinds in (("task", (str,)), ("cell", (dict,)), ("metric", (str,)), ("count", (int,))):
        if not isinstance(entry.get(key), kinds):
            return f'has no valid "{key}"'
    for key in ("value", "low", "high"):
        number = entry.get(key, "absent")
        if isinstance(number, bool) or not isinstance(number, int | float | None):
            return f'has no valid "{key}"'
    return ""


def environment(device: str) -> dict[str, str]:
    """Return the versions and the hardware that a result was measured with."""
    import torch
    import transformers

    hardware = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    if device.startswith("cuda") and torch.cuda.is_available():
        hardware = torch.cuda.get_device_name(torch.device(device))
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "hardware": hardware,
    }


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def capacity(accuracy_by_pairs: dict[int, float | None], threshold: float = CAPACITY_THRESHOLD) -> int:
    """Return the most pairs recalled: the largest number such that it and all smaller ones reach `threshold`.

    0 when even the smallest tested number of pairs fails. Missing values (None) count as failures.
    """
    best = 0
    for pairs in sorted(accuracy_by_pairs):
        accuracy = accuracy_by_pairs[pairs]
        if accuracy is None or accuracy < threshold:
            break
        best = pairs
    return best


def summarise(results: list[dict[str, Any]]) -> dict[str, float | int | None]:
    """Return the headline numbers of result entries, by dotted name.

    ``phonebook.capacity`` (at the shortest distance; ``phonebook.capacity.distance=N`` for the others),
    ``passkey.accuracy`` and ``passkey.accuracy.length=N`` (means over cells; likewise for copying and babilong, the
    latter also by ``task=qa1``), ``bits_per_byte`` (over all positions).
    """
    summary: dict[str, float | int | None] = {}
    books = [entry for entry in results if entry["task"] == "phonebook"]
    for place, distance in enumerate(sorted({entry["cell"]["distance"] for entry in books})):
        cells = {e["cell"]["pairs"]: e["value"] for e in books if e["cell"]["distance"] == distance}
        summary["phonebook.capacity" + (f".distance={distance}" if place else "")] = capacity(cells)
    for task, keys in _AVERAGED.items():
        cells_of_task = [entry for entry in results if entry["task"] == task and entry["metric"] == "accuracy"]
        if cells_of_task:
            summary[f"{task}.accuracy"] = _mean([entry["value"] for entry in cells_of_task])
        for key in keys:
            for place in sorted({entry["cell"][key] for entry in cells_of_task}):
                summary[f"{task}.accuracy.{key}={place}"] = _mean(
                    [entry["value"] for entry in cells_of_task if entry["cell"][key] == place]
                )
    ranges = [entry for entry in results if entry["task"] == "bits_per_byte" and entry["metric"] == "bits_per_byte"]
    if ranges:
        values = [entry["value"] for entry in ranges]
        total = sum(entry["bytes"] for entry in ranges)
        complete = None not in values and total > 0
        summary["bits_per_byte"] = sum(e["value"] * e["bytes"] for e in ranges) / total if complete else None
    return summary


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
