"""The tables of docs/retrieval_evidence/without.md, models without retrieval; report.py is the command.

A cell without retrieval has up to two runs. The control is trained as the cells with retrieval are: the same batch,
epochs, learning rate, examples and seed. Besides the layer only the precision of float32 products may differ, which a
row names. The other one has the recipe's larger batch and 64 epochs. Beside the paper stands the better of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from experiments.common.pages import NOT_RUN, number, share, table, until_then
from experiments.retrieval.cells import (
    MIXERS,
    PRESENT,
    REACHED,
    Cell,
    Row,
    best_rows,
    control_keys,
    controls,
    grid,
    published,
    rows_of,
    stopped,
)
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_WIDTHS

BANDS = {"below .01": (0.0, 0.01), ".01 to .5": (0.01, 0.5), ".5 to .9": (0.5, 0.9), ".9 to .999": (0.9, REACHED)}
CLOSE, NEAR = 0.02, 0.1
"""Differences from the paper that count as none, and as small."""
MARK = "*"
"""Behind an accuracy that is a control's."""
Pairs = dict[Cell, tuple[float, float]]


def long_runs() -> tuple[dict[Cell, Row], dict[Cell, Row]]:
    """The runs with the recipe's batch and 64 epochs: (rows that ended, entries that were stopped)."""
    ended, left = (
        {cell: run for cell, run in runs.items() if cell[1] is None} for runs in (rows_of(PRESENT), stopped())
    )
    return ended, left


def with_retrieval() -> dict[Cell, float]:
    """What a cell (without retrieval) recalls with it: the lower of the two places of the layer."""
    known = {cell: row["accuracy"] for cell, row in best_rows(PRESENT).items()}
    known |= {cell: run["accuracy"] for cell, run in stopped().items()}
    found: dict[Cell, float] = {}
    for (mixer, layer, length, width), accuracy in known.items():
        if layer is not None:
            cell = (mixer, None, length, width)
            found[cell] = min(found.get(cell, 1.0), accuracy)
    return found


def by_place(shown: Callable[[Cell], str]) -> str:
    """A line for each mixer and length, a column for each width."""
    lines = [
        [mixer, str(length), *(shown((mixer, None, length, width)) for width in RESONA_WIDTHS)]
        for mixer in MIXERS
        for length in RESONA_LENGTHS
    ]
    return table(["mixer", "L", *(f"d {width}" for width in RESONA_WIDTHS)], lines)


def controls_table() -> str:
    """Accuracy of each control, and of the same training with the layer."""
    (ended, left), beside = controls(), with_retrieval()

    def shown(cell: Cell) -> str:
        without = number(ended[cell]["accuracy"]) if cell in ended else NOT_RUN
        without = until_then(left[cell], 3) if cell in left else without
        return f"{without} / {share(beside[cell]) if cell in beside else NOT_RUN}"

    return by_place(shown)


def parts() -> dict[str, list[Cell]]:
    """The grid without retrieval divided for counts: by mixer, by length, by width, and all of it."""
    cells = grid((None,))
    found = {mixer: [cell for cell in cells if cell[0] == mixer] for mixer in MIXERS}
    found |= {f"L {length}": [cell for cell in cells if cell[2] == length] for length in RESONA_LENGTHS}
    found |= {f"d {width}": [cell for cell in cells if cell[3] == width] for width in RESONA_WIDTHS}
    return found | {"all": cells}


def control_counts_table() -> str:
    """How the controls came out; the means are those of the cells whose control ended."""
    (ended, _), beside = controls(), with_retrieval()
    lines = []
    for name, cells in parts().items():
        rows = [ended[cell]["accuracy"] for cell in cells if cell in ended]
        counts = [sum(low <= value < high for value in rows) for low, high in BANDS.values()]
        counts.append(sum(value >= REACHED for value in rows))
        with_it = [beside[cell] for cell in cells if cell in ended and cell in beside]
        means = [number(statistics.mean(rows)) if rows else "", share(statistics.mean(with_it)) if with_it else ""]
        lines.append([name, *map(str, (len(cells), len(rows), *counts)), *means])
    head = ["cells of", "cells", "ended", *BANDS, f"at {number(REACHED)}", "mean", "mean with the layer"]
    return table(head, lines, texts=1)


def best_runs(ended_only: bool = False) -> dict[Cell, tuple[Row, bool, bool]]:
    """The better run of each cell: (what is known of it, whether it ended, whether it is a control)."""
    found: dict[Cell, tuple[Row, bool, bool]] = {}
    for control, (ended, left) in ((False, long_runs()), (True, controls())):
        for done, runs in ((True, ended), (False, {} if ended_only else left)):
            for cell, run in runs.items():
                if cell not in found or run["accuracy"] > found[cell][0]["accuracy"]:
                    found[cell] = run, done, control
    return found


def baselines_table() -> str:
    """Accuracy without retrieval, the better of ours and the paper's."""
    best = best_runs()

    def shown(cell: Cell) -> str:
        theirs = published(cell[0], *cell[2:])
        if cell not in best:
            return f"{NOT_RUN} / {theirs}"
        run, ended, control = best[cell]
        return f"{number(run['accuracy']) if ended else until_then(run, 3)}{MARK if control else ''} / {theirs}"

    return by_place(shown)


def by_mixer(
    head: list[str], pairs: dict[Cell, tuple[float, float]], counts: Callable[[list[float]], list[int]]
) -> str:
    """A line for each mixer and one for all: cells, `counts` of the differences first - second, both means."""
    lines = []
    for name in (*MIXERS, "all"):
        found = [pair for cell, pair in pairs.items() if name in ("all", cell[0])]
        means = [number(statistics.mean(values)) for values in zip(*found, strict=True)] or ["", ""]
        lines.append([name, *map(str, [len(found), *counts([a - b for a, b in found])]), *means])
    return table(["mixer", "cells", *head], lines, texts=1)


def paper_pairs() -> Pairs:
    """The better of our runs that ended and the paper's, to three decimals."""
    best = best_runs(ended_only=True)
    return {
        cell: (round(best[cell][0]["accuracy"], 3), float(published(cell[0], *cell[2:])))
        for cell in grid((None,))
        if cell in best
    }


def against_paper(gaps: list[float]) -> list[int]:
    """How many are clearly above, about the same, a little below, far below."""
    edge = 1e-9  # .981 - .961 is not above .02
    higher, same = (sum(gap > CLOSE + edge for gap in gaps), sum(abs(gap) <= CLOSE + edge for gap in gaps))
    far = sum(gap < -NEAR - edge for gap in gaps)
    return [higher, same, len(gaps) - higher - same - far, far]


def paper_table() -> str:
    """How our cells without retrieval lie to the paper's."""
    head = ["higher", f"within {number(CLOSE, digits=2)}", f"to {number(NEAR, digits=1)} below", "further below"]
    return by_mixer([*head, "mean of ours", "of the paper's"], paper_pairs(), against_paper)


def budget_pairs() -> Pairs:
    """The cells in which both runs ended: (control, 64 epochs)."""
    (short, _), (long, _) = controls(), long_runs()
    return {
        cell: (short[cell]["accuracy"], long[cell]["accuracy"])
        for cell in grid((None,))
        if cell in short and cell in long
    }


def budgets_table() -> str:
    """The two budgets beside each other."""
    head = ["control higher", "lower", "mean of the controls", "of 64 epochs"]
    return by_mixer(head, budget_pairs(), lambda gaps: [sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)])


def tables() -> dict[str, str]:
    """Every table by the name in its marker; those of controls only where the record has such."""
    found = {"without retrieval": baselines_table()}
    if control_keys(PRESENT):
        found |= {
            "controls": controls_table(),
            "control counts": control_counts_table(),
            "beside the paper": paper_table(),
            "both budgets": budgets_table(),
        }
    return found
