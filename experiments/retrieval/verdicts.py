"""The tables of three sweeps beside the paper's numbers: pooled table 11, the paper's selector, MAD with four blocks.

Usage: python -m experiments.retrieval.verdicts FILE [FILE ...]     prints Markdown; seconds, CPU
FILE is a result of `longrecall sweep` with mqar_table11_pooled.yaml, mqar_table11_hard.yaml or mad_four_blocks.yaml,
also one that is not complete: a cell is the best of the learning rates that have a row, one without any is "not run".
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.intervals import rank_correlation
from experiments.common.pages import NOT_RUN, number, share, table
from experiments.retrieval.cells import REACHED, STOP
from longrecall.report.sweeps import published_mad, published_mqar
from longrecall.sweep.recipe import retrieval_layers
from longrecall.sweep.summary import best_rows
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_TABLE_1_COLUMNS, RESONA_WIDTHS

Best = Mapping[str, Any]
Place = tuple[str, tuple[int, ...], int, int]
"""Mixer, layers with retrieval, length, width."""
CLOSE, FAR = 0.02, 0.1
"""Differences from the paper's accuracies that are counted."""


def cells_of(record: Mapping[str, Any]) -> dict[Place, Best]:
    """The cells of table 11 that have a row, each with its best over learning rates."""
    found = {}
    for best in best_rows(record["rows"], "accuracy"):
        model, settings = best["model"], best["settings"]
        if best["value"] is not None:
            layers = retrieval_layers(model["retrieval"])
            found[model["mixer"], layers, settings["length"], model["hidden_size"]] = best
    return found


def table_11(record: Mapping[str, Any]) -> str:
    """Accuracy by width, ours / the paper's, for every mixer, place of retrieval and length."""
    cells, lines = cells_of(record), []
    widths = [width for width in RESONA_WIDTHS if any(cell[3] == width for cell in cells)]
    for mixer, layers in dict.fromkeys(cell[:2] for cell in cells):
        where = "+".join(map(str, layers)) or "none"
        for length in RESONA_LENGTHS:
            texts = []
            for width in widths:
                best = cells.get((mixer, layers, length, width))
                texts.append(NOT_RUN if best is None else f"{share(best['value'], 3)} / {theirs(best)}")
            lines.append([mixer, where, str(length), *texts])
    return table(["mixer", "layer", "L", *(f"d {width}" for width in widths)], lines, texts=3)


def theirs(best: Best) -> str:
    """The paper's accuracy in this cell."""
    value = published_mqar(best["model"], best["settings"])
    return "-" if value is None else number(value)


def against_paper(record: Mapping[str, Any]) -> str:
    """How the cells without retrieval compare with the paper's: by length, and all."""
    pairs = [
        (cell[2], best["value"], published)
        for cell, best in cells_of(record).items()
        if not cell[1] and (published := published_mqar(best["model"], best["settings"])) is not None
    ]
    lines = []
    for length in (*sorted({length for length, _, _ in pairs}), None):
        some = [(ours, paper) for of, ours, paper in pairs if length in (of, None)]
        apart = [ours - paper for ours, paper in some]
        counts = [
            sum(value > CLOSE for value in apart),
            sum(abs(value) <= CLOSE for value in apart),
            sum(value < -CLOSE for value in apart),
            sum(value < -FAR for value in apart),
        ]
        means = [number(statistics.mean(side)) for side in zip(*some, strict=True)] if some else ["", ""]
        ranks = number(rank_correlation(*map(list, zip(*some, strict=True))), digits=2) if len(some) > 2 else ""
        lines.append(["all" if length is None else str(length), str(len(some)), *map(str, counts), *means, ranks])
    heads = ["L", "cells", "above by > .02", "within .02", "below", "below by > .1", "mean", "the paper's mean"]
    return table([*heads, "rank correlation"], lines, texts=1)


def selector_table(record: Mapping[str, Any]) -> str:
    """The cells with retrieval by width and layer: how many reach what, and the lowest."""
    cells, lines = cells_of(record), []
    groups = sorted({(width, layers) for _, layers, _, width in cells if layers})
    for width, layers in groups:
        values = [best["value"] for cell, best in cells.items() if cell[1] == layers and cell[3] == width]
        counts = [len(values), *(sum(value >= limit for value in values) for limit in (REACHED, STOP))]
        where = "+".join(map(str, layers))
        lines.append([str(width), where, *map(str, counts), share(min(values)), share(statistics.mean(values))])
    return table(["d", "layer", "cells", "at .999", "at .9995", "lowest", "mean"], lines, texts=2)


def short_of(record: Mapping[str, Any]) -> str:
    """Every cell with retrieval that stays below .999."""
    lines = [
        [cell[0], "+".join(map(str, cell[1])), str(cell[2]), str(cell[3]), share(best["value"])]
        for cell, best in cells_of(record).items()
        if cell[1] and best["value"] < REACHED
    ]
    return table(["mixer", "layer", "L", "d", "accuracy"], lines, texts=1)


def mad_table(record: Mapping[str, Any], metric: str) -> str:
    """MAD by mixer, place of retrieval and selector: the mean over seeds at the best rate and decay / the paper's."""
    values: dict[tuple[str, str, str], dict[str, Best]] = {}
    for best in best_rows(record["rows"], metric):
        retrieval = best["model"]["retrieval"] or {}
        where = "+".join(map(str, retrieval_layers(best["model"]["retrieval"]))) or "none"
        key = best["model"]["mixer"], where, retrieval.get("selector", "")
        values.setdefault(key, {})[best["task"]] = best
    lines = []
    for (mixer, where, selector), found in values.items():
        paper = published_mad("transformer" if mixer == "attention" else mixer, where != "none")
        texts = []
        for index, task in enumerate(RESONA_TABLE_1_COLUMNS):
            mine = found.get(task)
            text = NOT_RUN if mine is None or mine["value"] is None else share(mine["value"], 3)
            texts.append(text if paper is None else f"{text} / {number(paper[index])}")
        lines.append([mixer, where, selector, *texts])
    heads = ["mixer", "layer", "selector", *(name.removeprefix("mad_") for name in RESONA_TABLE_1_COLUMNS)]
    return table(heads, lines, texts=3)


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The tables that a record has, by their names."""
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    if any(row["task"] in RESONA_TABLE_1_COLUMNS for row in rows):
        metrics = {"mad_accuracy": "MAD's own accuracy", "accuracy": "accuracy of all test labels"}
        return {f"MAD, {name}": mad_table(record, metric) for metric, name in metrics.items()}
    found = {"table 11": table_11(record)}
    if any(row["model"]["retrieval"] is None for row in rows):
        found["without retrieval, against the paper"] = against_paper(record)
    if any(row["model"]["retrieval"] for row in rows):
        found |= {"with retrieval": selector_table(record), "below .999": short_of(record)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for path in parser.parse_args(arguments).files:
        record = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.name}: {len(record['rows'])} of {record['runs']} runs\n")
        for name, text in tables(record).items():
            print(f"{name}\n\n{text}")


if __name__ == "__main__":
    main()
