"""The cells of the recorded sweeps of table 11: which row shows a cell, which runs were stopped, what the paper has.

A cell is a mixer, a place of the retrieval layer (None = none), a length and a width. Where the `calls` of a file have
`again`, a cell has several runs of the same kind; where they have `controls`, a cell without retrieval may have a run
that was trained as those with it, beside the sweep's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common.pages import number, read
from experiments.retrieval.join_sweeps import control_runs, runs_again
from longrecall.report.sweeps import published_mqar
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_WIDTHS

PRESENT = "mqar_table11.json"
BEFORE = "mqar_table11_without_runners_up.json"
OURS = "mqar_ours.json"
HARD = "mqar_table11_hard.json"
"""Table 11 with retrieval by the paper's own selector."""
MIXERS = ("base_conv", "h3", "hyena", "rwkv5", "mamba", "mamba2")
LAYERS = (0, 2)
OUR_MIXERS = ("gla", "gated_delta_net", "gated_delta_net_e4")
REACHED = 0.999
"""Accuracy that the page counts; `STOP` ends a run."""
STOP = 0.9995
Cell = tuple[str, int | None, int, int]
Row = Mapping[str, Any]


def cell_of(model: Mapping[str, Any], settings: Mapping[str, Any]) -> Cell:
    """The place of a run in the table."""
    layer = None if model["retrieval"] is None else model["retrieval"]["layer"]
    return model["mixer"], layer, settings["length"], model["hidden_size"]


def again_keys(file: str) -> set[str]:
    """The keys of the further runs of cells that have another."""
    calls = read(file).get("calls", {})
    return {spec.key for spec in runs_again(calls)} if "again" in calls else set()


def control_keys(file: str) -> set[str]:
    """The keys of the runs without retrieval that were trained as those with it."""
    calls = read(file).get("calls", {})
    return {spec.key for spec in control_runs(calls)} if "controls" in calls else set()


def rows_of(file: str) -> dict[Cell, Row]:
    """The rows of one sweep by (mixer, layer with retrieval, length, width), without further runs and controls."""
    found: dict[Cell, Row] = {}
    further = again_keys(file) | control_keys(file)
    for row in read(file)["rows"]:
        cell = cell_of(row["model"], row["settings"])
        if row.get("key") in further:
            continue
        if cell in found:
            raise ValueError(f"{file}: two rows of {cell}")
        found[cell] = row
    return found


def best_rows(file: str) -> dict[Cell, Row]:
    """The same with the best of all rows of a cell; of equal ones the sweep's own."""
    found, further = rows_of(file), again_keys(file)
    for row in read(file)["rows"]:
        cell = cell_of(row["model"], row["settings"])
        if row.get("key") in further and (cell not in found or row["accuracy"] > found[cell]["accuracy"]):
            found[cell] = row
    return found


def stopped(file: str = PRESENT) -> dict[Cell, Row]:
    """The cells whose best run was in training when the time was up: its epochs and its best accuracy."""
    return {(c["mixer"], c["layer"], c["length"], c["width"]): c for c in read(file)["left"]["cut_off"]}


def controls(file: str = PRESENT) -> tuple[dict[Cell, Row], dict[Cell, Row]]:
    """The controls by cell: (rows of those that ended, entries of those that were stopped)."""
    record, keys = read(file), control_keys(file)
    ended = {cell_of(row["model"], row["settings"]): row for row in record["rows"] if row.get("key") in keys}
    left = record["left"].get("controls", [])
    return ended, {(c["mixer"], c["layer"], c["length"], c["width"]): c for c in left}


def grid(layers: tuple[int | None, ...] = LAYERS) -> list[Cell]:
    """Every cell of table 11, mixer by mixer."""
    return [(m, i, length, d) for m in MIXERS for i in layers for length in RESONA_LENGTHS for d in RESONA_WIDTHS]


def published(mixer: str, length: int, width: int) -> str:
    """The paper's accuracy in a cell without retrieval."""
    model = {"mixer": mixer, "hidden_size": width, "layers": 4, "retrieval": None}
    found = published_mqar(model, {"length": length, "pairs": length // 16})
    if found is None:
        raise ValueError(f"nothing is published for {mixer}, length {length}, width {width}")
    return number(found)
