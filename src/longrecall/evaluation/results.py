"""Result files, checked when read (docs/reference/files.md, "Result files"); `longrecall.files` writes them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.evaluation.outcomes import unpack
from longrecall.evaluation.statistics import bootstrap_ratio_interval, mean_interval
from longrecall.tasks.registry import declaration_of

SCHEMA = 1
GENERATOR = {"samples": "sha256, PCG64, doubles; version 1", "intervals": "PCG64, doubles; version 1"}
"""How samples (`longrecall.tasks.encoding.sample_generator`) and resamples are drawn; a change makes a new version."""
CAPACITY_THRESHOLD = 0.9
_PARTS_OF_CELLS = ("task", "length")
"""Parts of a cell by which a task is averaged too, beside the average over all its cells."""


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise `UserError` when it is missing or no JSON object."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the result file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
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
    if "schema" not in data:
        raise UserError(f"{source} is not a result file: it has no schema; give a file that eval wrote")
    if data["schema"] != SCHEMA:
        raise UserError(f"{source}: schema {data['schema']!r} is not {SCHEMA}; it was written by another version")
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
        huge = isinstance(number, int) and abs(number) > sys.float_info.max
        if huge or isinstance(number, bool) or not isinstance(number, int | float | None):
            return f'has no valid "{key}"'
    return ""


def definition(name: str, version: int, options: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of a task definition: its name, its version and its options as plain JSON values.

    Equal definitions with an equal seed ask the same questions; an option that is left out is not one at its default.
    """
    plain = {"name": name, "version": version, "options": options}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def definitions(tasks: Iterable[Any], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the "task_definition" and "generator" parts of a result file.

    `tasks`: task objects with `name` and, where it is not 1, `version`; `options`: those of each by name, as recorded
    under "settings".
    """
    hashed = {task.name: definition(task.name, getattr(task, "version", 1), options[task.name]) for task in tasks}
    return {"task_definition": hashed, "generator": dict(GENERATOR)}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one result of several that asked the same checkpoint different tasks, as `evaluate` writes it.

    "lengths" and "samples" of the first part stand for all tasks; where a later part has others, they are recorded
    under ``settings.by_task``, by the name of the task.
    """
    first, entries = parts[0], [entry for part in parts for entry in part["results"]]
    settings = dict(first["settings"])
    own = {
        task: {key: part["settings"][key] for key in ("lengths", "samples") if part["settings"][key] != settings[key]}
        for part in parts[1:]
        for task in part["settings"]["tasks"]
    }
    settings["tasks"] = [task for part in parts for task in part["settings"]["tasks"]]
    settings["options"] = {name: of for part in parts for name, of in part["settings"]["options"].items()}
    settings |= {"by_task": by_task} if (by_task := {task: values for task, values in own.items() if values}) else {}
    return {
        **first,
        "settings": settings,
        "results": entries,
        "summary": summarise(entries),
        "summary_intervals": summary_intervals(entries),
        "task_definition": {name: of for part in parts for name, of in part["task_definition"].items()},
    }


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


def capacity(accuracy_by_amount: dict[int, float | None], threshold: float = CAPACITY_THRESHOLD) -> int:
    """Return how much is recalled: the largest amount such that it and all smaller ones reach `threshold`.

    0 when even the smallest tested amount fails. Missing values (None) count as failures.
    """
    best = 0
    for amount in sorted(accuracy_by_amount):
        accuracy = accuracy_by_amount[amount]
        if accuracy is None or accuracy < threshold:
            break
        best = amount
    return best


def summarise(results: list[dict[str, Any]]) -> dict[str, float | int | None]:
    """Return the headline numbers of result entries, by dotted name.

    The capacity of tasks that declare one, such as ``phonebook.capacity`` (at the shortest distance;
    ``phonebook.capacity.distance=N`` for the others), ``bits_per_byte`` (over all positions), and of every other task
    the mean over cells of its first metric, such as ``passkey.accuracy``, also by length and by type of question where
    cells say them: ``passkey.accuracy.length=512``, ``babilong.accuracy.task=qa1``.
    """
    summary: dict[str, float | int | None] = {}
    for name, by_amount in _capacities(results).items():
        summary[name] = capacity({amount: entry["value"] for amount, entry in by_amount.items()})
    for name, entries in _averages(results).items():
        summary[name] = _mean([entry["value"] for entry in entries])
    for name, pooled in _pooled(results).items():
        total = sum(entry["bytes"] for entry in pooled)
        complete = None not in [entry["value"] for entry in pooled] and total > 0
        summary[name] = sum(e["value"] * e["bytes"] for e in pooled) / total if complete else None
    return summary


def summary_intervals(results: list[dict[str, Any]]) -> dict[str, list[float | int]]:
    """Return [low, high], 95%, of each number of `summarise` that has an interval.

    A mean over cells: the half-widths of independent cells add in squares. Bits per byte: bootstrap over windows, each
    with all its positions. A capacity: what it would be with every cell at its lower, and at its upper, end; that is
    wider than 95% asks for, because all cells do not stray to one side together.
    """
    intervals: dict[str, list[float | int]] = {}
    for name, by_amount in _capacities(results).items():
        ends = [capacity({amount: entry[end] for amount, entry in by_amount.items()}) for end in ("low", "high")]
        if all(entry["value"] is not None for entry in by_amount.values()):
            intervals[name] = list(ends)
    for name, entries in _averages(results).items():
        mean = _mean([entry["value"] for entry in entries])
        if mean is not None:
            ends_of_mean = mean_interval([(entry["value"], entry["low"], entry["high"]) for entry in entries])
            if ends_of_mean is not None:
                intervals[name] = list(ends_of_mean)
    for name, pooled in _pooled(results).items():
        parts = [unpack(e["outcomes"], name) for e in pooled if e.get("outcomes")]
        if len(parts) == len(pooled) and len({len(part.scores) for part in parts}) == 1:
            bits, sizes = (sum(column) for column in zip(*((part.scores, part.weights) for part in parts), strict=True))
            interval = bootstrap_ratio_interval(bits, sizes)
            if interval is not None:
                intervals[name] = list(interval)
    return intervals


_Groups = dict[str, list[dict[str, Any]]]


def _capacities(results: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return name of a capacity -> amount -> its entry, of the tasks that declare one."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for task in dict.fromkeys(entry["task"] for entry in results):
        declared = declaration_of(task).capacity
        entries = [entry for entry in results if (entry["task"], entry["metric"]) == (task, "accuracy")]
        if declared is None or not entries:
            continue
        for order, place in enumerate(sorted({entry["cell"].get(declared.apart, 0) for entry in entries})):
            name = f"{task}.capacity" + (f".{declared.apart}={place}" if order else "")
            here = [entry for entry in entries if entry["cell"].get(declared.apart, 0) == place]
            groups[name] = {entry["cell"][declared.counted]: entry for entry in here}
    return groups


def _averages(results: list[dict[str, Any]]) -> _Groups:
    """Return the entries behind each mean: of the first metric of each task, and parts of them."""
    groups: _Groups = {}
    metrics: dict[str, str] = {}
    for entry in results:
        metrics.setdefault(entry["task"], entry["metric"])
    for task, metric in metrics.items():
        if not declaration_of(task).averaged:
            continue
        entries = [entry for entry in results if (entry["task"], entry["metric"]) == (task, metric)]
        groups[f"{task}.{metric}"] = entries
        for key in _PARTS_OF_CELLS:
            for place in sorted({entry["cell"][key] for entry in entries if key in entry["cell"]}):
                groups[f"{task}.{metric}.{key}={place}"] = [e for e in entries if e["cell"].get(key) == place]
    return groups


def _pooled(results: list[dict[str, Any]]) -> _Groups:
    """Return the entries of each task that declares a metric to be summed up over the bytes of all its cells."""
    groups: _Groups = {}
    for entry in results:
        if entry["metric"] == declaration_of(entry["task"]).pooled:
            groups.setdefault(entry["task"], []).append(entry)
    return groups


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
