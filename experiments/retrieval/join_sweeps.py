"""Join the rows of later calls of a sweep with those on record.

Usage: python -m experiments.retrieval.join_sweeps RECORD ROWS [ROWS ...] -o FILE [--about TEXT]
           [--recipe RECIPE] [--again OVERRIDE ...] [--control OVERRIDE ...]

RECORD is a result file with `calls`: the recipe, and the overrides of each call that made its rows (`shared` with each
of `with_retrieval`, and `without_retrieval`; or, for other recipes, `shared` with each of `groups`). Without rows it is
the beginning of a record. ROWS are files with `rows` and, for the runs that were in training when the time was up,
`running`. A row counts when it is a run of these calls, by its key; others are left out, and said. A cell that has no
row is named in `left`: `cut_off` with the epochs, the best accuracy and the history of the run that was stopped, where
a file has it, or, if it has retrieval (with `groups`: any), `not_started`. Of several stopped runs of a cell the best
one is named.
With --recipe the record gives its overrides alone: the file begins without rows, for the models of another recipe.
--again adds a call to the record (behind `shared`; once for each call): further runs of cells that it has, at other
learning rates say. Such a cell has several rows; it is open while it has none, and `cut_off` has it too when a stopped
run came further than its rows. All the further runs that were stopped are in `left` under `again`, by key.
--control adds a call too (`controls`, behind `shared`): the training of the cells with retrieval for models without it.
A cell without retrieval may have such a run beside its own. What was stopped of these is in `left` under `controls`, by
key, and in `cut_off` there is none of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from experiments.common.pages import ROOT
from longrecall.evaluation.results import now
from longrecall.files import write_json
from longrecall.sweep.grid import RunSpec, runs_of
from longrecall.sweep.journal import KIND, SCHEMA
from longrecall.sweep.recipe import SweepRecipe
from longrecall.version import __version__

Row = Mapping[str, Any]


@functools.cache
def runs_with(recipe: str, *overrides: str) -> tuple[RunSpec, ...]:
    """The runs of a recipe (a path below the repository) with overrides; made once, as every table asks for them."""
    return tuple(runs_of(SweepRecipe.load(ROOT / recipe, overrides)))


def runs_again(calls: Mapping[str, Any]) -> list[RunSpec]:
    """The further runs of cells that the other calls have."""
    groups = calls.get("again", [])
    return [spec for group in groups for spec in runs_with(calls["recipe"], *calls["shared"], *group)]


def control_runs(calls: Mapping[str, Any]) -> list[RunSpec]:
    """The runs without retrieval that are trained as those with it; ValueError when one of them has it."""
    groups = calls.get("controls", [])
    found = [spec for group in groups for spec in runs_with(calls["recipe"], *calls["shared"], *group)]
    for spec in found:
        if spec.model.retrieval is not None:
            raise ValueError(f"{cell(spec)} is no control: it has retrieval")
    return found


def runs_by_key(calls: Mapping[str, Any]) -> dict[str, RunSpec]:
    """Every run of the recorded calls, those with retrieval first, the further runs of a cell and the controls last."""
    groups = [[*calls["shared"], *group] for group in calls.get("groups") or calls["with_retrieval"]]
    if "groups" not in calls:
        groups.append(list(calls["without_retrieval"]))
    found = [spec for group in groups for spec in runs_with(calls["recipe"], *group)]
    known = {str(cell(spec)) for spec in found}
    further = [*runs_again(calls), *control_runs(calls)]
    for spec in further:
        if str(cell(spec)) not in known:
            raise ValueError(f"no other call has a run of {cell(spec)}: that is no further one")
    return {spec.key: spec for spec in [*found, *further]}


def rows_together(specs: Mapping[str, RunSpec], files: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Row], list[Row]]:
    """Return (key -> row in the order of the runs, the rows that are none of them); the first row of a run counts."""
    rows: dict[str, Row] = {}
    strange: list[Row] = []
    for file in files:
        for row in file.get("rows", []):
            if row["key"] in specs:
                rows.setdefault(row["key"], row)
            else:
                strange.append(row)
    return {key: rows[key] for key in specs if key in rows}, strange


def cell(spec: RunSpec) -> dict[str, Any]:
    """The name of a cell; of recall, which needs no name, there are several lengths."""
    model = spec.model.description()
    return {
        **({} if spec.task == "mqar" else {"task": spec.task}),
        "mixer": model["mixer"],
        "layer": None if model["retrieval"] is None else model["retrieval"]["layer"],
        "length": spec.settings["length"],
        "width": model["hidden_size"],
    }


def better(known: dict[str, Any] | None, entry: dict[str, Any]) -> dict[str, Any]:
    """Of two runs of a cell that were stopped, the one with the higher accuracy; of equal ones the later."""
    if known is None or known.get("accuracy", -1.0) <= entry.get("accuracy", -1.0):
        return entry
    return known


def stopped_runs(
    names: Mapping[str, Mapping[str, Any]], further: Set[str], files: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """How far the runs (key -> cell) came that a file says were stopped; those in `further` are known by their key."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        left = file.get("left", {})
        for entry in [*left.get("cut_off", []), *left.get("again", []), *left.get("controls", [])]:
            for key, name in names.items():
                if entry["key"] == key if "key" in entry else key not in further and entry.items() >= name.items():
                    found[key] = better(found.get(key), entry)
        for row in file.get("running", []):
            if (key := row["key"]) in names:
                reached = {name: row[name] for name in ("epochs", "accuracy", "history")}
                entry = {**names[key], **reached, **({"key": key} if key in further else {})}
                found[key] = better(found.get(key), entry)
    return found


def left_open(
    specs: Mapping[str, RunSpec],
    further: Set[str],
    rows: Mapping[str, Row],
    files: Sequence[Mapping[str, Any]],
    every: bool = False,
    controls: Set[str] = frozenset(),
) -> dict[str, list[dict[str, Any]]]:
    """What became of the cells without a row; of those not begun only the ones with retrieval, or `every` one.

    `further` and `controls` are the keys of runs whose cell has another.
    """
    names = {key: cell(spec) for key, spec in specs.items()}
    stopped = {key: entry for key, entry in stopped_runs(names, further | controls, files).items() if key not in rows}
    runs: dict[str, list[str]] = {}
    for key, name in names.items():
        if key not in controls:
            runs.setdefault(str(name), []).append(key)
    cut_off, not_started = [], []
    for keys in runs.values():
        ended = [rows[key]["accuracy"] or 0.0 for key in keys if key in rows]
        known = [stopped[key] for key in keys if key in stopped]
        if known:
            best = max(known, key=lambda entry: entry.get("accuracy", 0.0))
            if not ended or best.get("accuracy", 0.0) > max(ended):
                cut_off.append(best)
        elif not ended and (every or specs[keys[0]].model.retrieval):
            not_started.append(names[keys[0]])
    left = {"cut_off": cut_off, "not_started": not_started}
    for state, keys_of in (("again", further), ("controls", controls)):
        if keys_of:
            left[state] = [stopped[key] for key in specs if key in keys_of and key in stopped]
    return left


def joined(
    record: Mapping[str, Any],
    later: Sequence[Mapping[str, Any]],
    about: str = "",
    recipe: str | None = None,
    again: Sequence[Sequence[str]] = (),
    controls: Sequence[Sequence[str]] = (),
) -> tuple[dict[str, Any], list[Row]]:
    """Return (the new record, the rows that belong to none of its calls); see the module for the arguments."""
    calls = dict(record["calls"])
    if recipe is not None:
        calls = {k: v for k, v in calls.items() if k not in ("again", "controls")} | {"recipe": recipe}
    for name, groups in (("again", again), ("controls", controls)):
        if groups:
            known = calls.get(name, [])
            calls[name] = [*known, *(list(group) for group in groups if list(group) not in known)]
    specs = runs_by_key(calls)
    files = [*([record] if recipe is None else []), *later]
    rows, strange = rows_together(specs, files)
    further, beside = ({spec.key for spec in found(calls)} for found in (runs_again, control_runs))
    left = left_open(specs, further, rows, files, every="groups" in calls, controls=beside)
    plain = SweepRecipe.load(ROOT / calls["recipe"])
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "created": now(),
        "longrecall": record.get("longrecall", __version__),
        # What the last call does not say of its machine stays as it was.
        "environment": {**record.get("environment", {}), **later[-1].get("environment", {})},
        "about": " ".join(text for text in (record.get("about", "") if recipe is None else "", about) if text),
        "recipe": plain.to_dict(),
        "complete": len(rows) == len(specs),
        "runs": len(specs),
    }
    return {**head, "calls": calls, "left": left, "rows": list(rows.values())}, strange


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line above; exit code 2 when a file is no such record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--about", default="")
    parser.add_argument("--recipe")
    for option in ("--again", "--control"):
        parser.add_argument(option, nargs="+", action="append", default=[], metavar="OVERRIDE")
    args = parser.parse_args(arguments)
    try:
        record, *later = (json.loads(path.read_text(encoding="utf-8")) for path in (args.record, *args.rows))
        result, strange = joined(record, later, args.about, args.recipe, args.again, args.control)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a UserError is a ValueError
        print(f"cannot join: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    write_json(args.output, result, "choose another --output")
    left = {state: len(cells) for state, cells in result["left"].items()}
    print(f"{len(result['rows'])} of {result['runs']} runs, {len(strange)} rows of other runs left out, open: {left}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
