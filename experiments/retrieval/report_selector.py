"""The tables of docs/retrieval_evidence/selector.md: table 11 by the paper's own selector; report.py is the command.

With `hard` a chunk's score only selects it, so the encoders get no gradient and stay as they began. Beside each cell
stand the sweep's own run with `weighted` and the control without the layer: same batch, epochs at most, rate, examples
and seed.
"""

from __future__ import annotations

import statistics

from experiments.common.pages import NOT_RUN, share, table
from experiments.retrieval.cells import HARD, LAYERS, MIXERS, PRESENT, REACHED, Cell, controls, grid, rows_of
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_WIDTHS

AT_ONCE = 7
"""Runs beside each other on the H200 in the recorded call."""


def widths() -> list[int]:
    """The widths that have a run."""
    found = {cell[3] for cell in rows_of(HARD)}
    return [width for width in RESONA_WIDTHS if width in found]


def accuracies(layer: int | None, selector: str = "hard") -> dict[Cell, float]:
    """Best accuracy by cell with the layer there: of `hard`, of `weighted`, or (None) of the controls."""
    rows = controls()[0] if layer is None else rows_of(HARD if selector == "hard" else PRESENT)
    return {cell: row["accuracy"] for cell, row in rows.items() if cell[1] == layer and cell[3] in widths()}


def cells_table() -> str:
    """Both selectors in every cell that `hard` has, and the same training without the layer."""
    columns = [(layer, selector) for layer in LAYERS for selector in ("hard", "weighted")] + [(None, "")]
    found = {column: accuracies(*column) for column in columns}
    lines = []
    for width in widths():
        for mixer in MIXERS:
            for length in RESONA_LENGTHS:
                places = [found[column].get((mixer, column[0], length, width)) for column in columns]
                shown = [NOT_RUN if value is None else share(value) for value in places]
                lines.append([mixer, str(length), str(width), *shown])
    heads = ["no layer" if layer is None else f"layer {layer}, `{name}`" for layer, name in columns]
    return table(["mixer", "L", "d", *heads], lines)


def counts_table() -> str:
    """How the cells of each selector came out, by width, place of the layer and length."""
    lines = []
    for width in widths():
        for layer in LAYERS:
            for length in (*RESONA_LENGTHS, None):
                texts = []
                for selector in ("hard", "weighted"):
                    found = accuracies(layer, selector)
                    some = [v for cell, v in found.items() if cell[3] == width and length in (None, cell[2])]
                    texts.append([f"{sum(value >= REACHED for value in some)} of {len(some)}"])
                    texts[-1] += [share(value) for value in (min(some), statistics.mean(some))]
                named = "all" if length is None else str(length)
                lines.append(
                    [str(width), str(layer), named, *(text for pair in zip(*texts, strict=True) for text in pair)]
                )
    heads = [f"{what}, `{name}`" for what in ("at .999", "lowest", "mean") for name in ("hard", "weighted")]
    return table(["d", "layer", "L", *heads], lines)


def left() -> dict[int, int]:
    """Runs of each width that has none yet, at one rate."""
    return {width: sum(cell[3] == width for cell in grid()) for width in RESONA_WIDTHS if width not in widths()}


def minutes(width: int) -> float:
    """Minutes of one GPU for the cells of a width with `hard`.

    A cell takes as many epochs as the recorded one of its mixer, place and length, each as long as an epoch of the
    recorded runs with `weighted` at this width and length.
    """
    weighted = [(cell, row) for cell, row in rows_of(PRESENT).items() if cell[1] is not None and cell[3] == width]
    seconds = 0.0
    for length in RESONA_LENGTHS:
        some = [row for cell, row in weighted if cell[2] == length]
        epoch = sum(row["seconds"] for row in some) / sum(row["epochs"] for row in some)
        seconds += epoch * sum(row["epochs"] for cell, row in rows_of(HARD).items() if cell[2] == length)
    return seconds / AT_ONCE / 60


def hours_left() -> float:
    """Hours of one GPU for all widths without a run."""
    return sum(map(minutes, left())) / 60


def price_table() -> str:
    """What the widths without a run would take."""
    lines = [[str(width), str(runs), f"{minutes(width):.0f}"] for width, runs in left().items()]
    whole = [str(sum(left().values())), f"{60 * hours_left():.0f}"]
    return table(["d", "runs", "minutes of one H200"], [*lines, ["all", *whole]], texts=1)


def tables() -> dict[str, str]:
    """Every table by the name in its marker."""
    return {"selectors": cells_table(), "selector counts": counts_table(), "selector price": price_table()}
