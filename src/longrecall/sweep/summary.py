"""What a sweep found: for every cell and model the best over learning rates and weight decays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longrecall.sweep.grid import RunSpec, sizes, steps_of
from longrecall.sweep.recipe import TRAIN, retrieval_layers
from longrecall.tables import aligned

Row = Mapping[str, Any]
MISSING = "-"


def cell_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return `rows` with each that was tested on several sets as one row for each set, a cell of its own."""
    found: list[dict[str, Any]] = []
    for row in rows:
        pool = {"pool": _pool_text(row["pool"])} if row.get("pool") else {}
        trained = {**pool, TRAIN: row["settings"].get(TRAIN)}
        tests = [{**row, **test, "settings": {**test["settings"], **trained}} for test in row.get("tests", ())]
        found += tests or [dict(row)]
    return found


def _pool_text(pool: Sequence[Mapping[str, Any]]) -> str:
    """Return the sets that were trained on together in a few words, what is the same in all of them left out."""
    same = {key for key in pool[0] if len(pool) > 1 and len({str(part.get(key)) for part in pool}) == 1}
    return ", ".join(" ".join(f"{key} {value}" for key, value in part.items() if key not in same) for part in pool)


def best_rows(rows: Sequence[Row], metric: str) -> list[dict[str, Any]]:
    """Return the best result of every cell and model, in the order of `rows`; a set of test rows is a cell.

    A pair of learning rate and weight decay counts with its mean over the seeds that ended; the pair with the highest
    mean is taken. Where no run ended the value is None.
    """
    groups: dict[str, dict[str, Any]] = {}
    for row in cell_rows(rows):
        name = json.dumps([row["task"], row["settings"], row["model"]], sort_keys=True)
        group = groups.setdefault(
            name, {"task": row["task"], "settings": row["settings"], "model": row["model"], "tried": {}}
        )
        if row.get(metric) is not None:
            group["tried"].setdefault((row["learning_rate"], row["weight_decay"]), []).append(float(row[metric]))
    best: list[dict[str, Any]] = []
    for group in groups.values():
        means = {pair: sum(values) / len(values) for pair, values in group.pop("tried").items()}
        pair = max(means, key=lambda key: means[key]) if means else None
        chosen = {"learning_rate": pair[0], "weight_decay": pair[1]} if pair else {}
        best.append({**group, "metric": metric, "value": means[pair] if pair else None, **chosen})
    return best


def summary_lines(rows: Sequence[Row], metric: str) -> list[str]:
    """Return a table for each task: models down and cells across, or the other way round where that is narrower."""
    best = best_rows(rows, metric)
    lines: list[str] = []
    for task in dict.fromkeys(entry["task"] for entry in best):
        entries = [entry for entry in best if entry["task"] == task]
        cells = _names([entry["settings"] for entry in entries])
        models = _names([_flat(entry["model"]) for entry in entries])
        values = {(cell, model): entry["value"] for cell, model, entry in zip(cells, models, entries, strict=True)}
        down, across = list(dict.fromkeys(models)), list(dict.fromkeys(cells))
        turned = len(across) > len(down)
        if turned:
            down, across = across, down
        body = [
            [name, *(_number(values.get((name, other) if turned else (other, name))) for other in across)]
            for name in down
        ]
        if turned:
            body.append(["mean", *(_mean([values.get((name, other)) for name in down]) for other in across)])
        title = f"{task}: {metric}, the best over learning rates and weight decays"
        lines += [*([""] if lines else []), title, *aligned([["", *across], *body], left=1)]
    return lines


def progress_line(row: Row, done: int, runs: int, metric: str) -> str:
    """Return what the end of a run comes to in one line, the accuracy on every set of test rows in turn."""
    model, values = _flat(row["model"]), [test[metric] for test in row.get("tests") or [row]]
    words = f"{model['mixer']} {model['hidden_size']} wide, rate {row['learning_rate']:.3g}, seed {row['seed']}"
    found = "/".join(map(_number, values))
    time = "" if row["seconds"] is None else f", {row['seconds']:.0f} s"
    return f"{done} of {runs}: {row['task']} {words}: {metric} {found}, {row['steps']:,} steps{time}, {row['status']}"


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's part of a row with a name first: ``gla+R0`` is GLA with retrieval in layer 0."""
    retrieval = model["retrieval"] or {}
    added = "".join(f"+R{index}" for index in retrieval_layers(model["retrieval"]))
    options = {f"retrieval.{key}": value for key, value in retrieval.items() if key != "layer"}
    sizes = {key: value for key, value in model.items() if key not in ("mixer", "retrieval")}
    return {"mixer": f"{model['mixer']}{added}", **options, **sizes}


def _names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each entry: its mixer, and what is not the same in all that have it."""
    keys = dict.fromkeys(key for entry in entries for key in entry if key != "mixer")
    varying = [key for key in keys if len({str(entry[key]) for entry in entries if key in entry}) > 1]
    names = []
    for entry in entries:
        parts = [str(entry["mixer"])] if "mixer" in entry else []
        names.append(" ".join([*parts, *(f"{key}={entry[key]}" for key in varying if key in entry)]) or "all")
    return names


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known)) if known and len(known) == len(values) else MISSING


def plan(specs: Sequence[RunSpec]) -> list[dict[str, Any]]:
    """Return what a sweep would train: an entry for each cell and model, with its parameters and number of runs.

    ``problem`` says why a model cannot be built, None where it can.
    """
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs:
        known = spec.row()
        if spec.pool:
            known["settings"] |= {"pool": _pool_text(known["pool"])}
        name = json.dumps([known["task"], known["settings"], known["model"]], sort_keys=True)
        if name not in entries:
            problem, parameters, state_size = None, None, None
            try:
                parameters, state_size = sizes(spec)
            except ValueError as error:  # a UserError
                problem = str(error)
            entries[name] = {
                **{key: known[key] for key in ("task", "settings", "model", "batch_size")},
                **{"parameters": parameters, "state_size": state_size, "problem": problem},
                **{"steps": steps_of(spec), "runs": 0},
            }
        entries[name]["runs"] += 1
    return list(entries.values())


def plan_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the plan as an aligned table."""
    cells, models = _names([e["settings"] for e in entries]), _names([_flat(e["model"]) for e in entries])
    table = [["task", "cell", "model", "parameters", "state", "batch", "steps", "runs"]]
    for cell, model, entry in zip(cells, models, entries, strict=True):
        counts = ("parameters", "state_size", "batch_size", "steps", "runs")
        numbers = [MISSING if entry[key] is None else f"{entry[key]:,}" for key in counts]
        table.append([entry["task"], cell, model, *numbers])
    problems = dict.fromkeys(entry["problem"] for entry in entries if entry["problem"])
    return [*aligned(table, left=3), *(f"cannot be built: {problem}" for problem in problems)]
