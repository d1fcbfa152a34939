"""Recorded sweeps of table 11 and timings of retrieval as the tables of docs/retrieval_evidence.md and its folder.

Usage: python -m experiments.retrieval.report            rewrites what stands between the markers
       python -m experiments.retrieval.report --check    changes nothing; exit code 1 when a table is out of date

The table is that of the RESONA paper. A cell is a mixer, a place of the retrieval layer (None = none), a length and a
width: one run each, so no number here has an interval. Where the `calls` of the file have `again`, a cell has several:
it shows the best of them, as the paper does, and a table names them all. A run ends at `STOP`. A cell whose run was
still going when the time was up shows the best accuracy of an evaluation until then and the epochs; one that had not
begun says so. The mixers of `OURS` and the MAD suite (report_mad.py) have their tables once their files are there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from experiments.common import pages
from experiments.common.pages import NOT_RUN, number, read, share, table, until_then
from experiments.retrieval import report_controls, report_mad, report_perplexity, report_selector
from experiments.retrieval.cells import (
    BEFORE,
    HARD,
    LAYERS,
    MIXERS,
    OUR_MIXERS,
    OURS,
    PRESENT,
    REACHED,
    STOP,
    Cell,
    Row,
    best_rows,
    cell_of,
    grid,
    rows_of,
    stopped,
)
from experiments.retrieval.join_sweeps import runs_again, runs_by_key
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_WIDTHS

PAGE = "retrieval_evidence.md"
TIMINGS = pages.ROOT / "benchmarks" / "results" / "gpu_retrieval.json"
EPOCHS = {"1 epoch": range(1, 2), "2": range(2, 3), "3–5": range(3, 6), "6–24": range(6, 25)}
NEVER = "never"
MODELS = {"gla_1.3b": "GLA", "mamba2_1.3b": "Mamba-2", "gated_delta_net_1.5b": "Gated DeltaNet"}
TRANSFORMER = "transformer_1.5b"
PAPER_PREFILL = {
    2048: {"GLA": (37, 46), "Mamba": (45, 52), "DeltaNet": (53, 64)},
    4096: {"GLA": (43, 64), "Mamba": (77, 88), "DeltaNet": (59, 78)},
    8192: {"GLA": (62, 104), "Mamba": (149, 170), "DeltaNet": (72, 103)},
    16384: {"GLA": (109, 202), "Mamba": (294, 349), "DeltaNet": (106, 181)},
    32768: {"GLA": (202, 386), "Mamba": (571, 653), "DeltaNet": (208, 338)},
    65536: {"GLA": (407, 757), "Mamba": (1118, 1285), "DeltaNet": (412, 652)},
    131072: {"GLA": (806, 1518), "Mamba": (2257, 2412), "DeltaNet": (807, 1289)},
}
"""RESONA, table 5: tokens -> model -> milliseconds to read them (without, with retrieval)."""
TIMED = (2048, 8192, 32768, 131072)


def outcomes(file: str) -> dict[Cell, str]:
    """The accuracy of each cell that ended, and what is known of each that was stopped."""
    ended = {cell: share(row["accuracy"]) for cell, row in best_rows(file).items()}
    return ended | {cell: until_then(run) for cell, run in stopped(file).items()}


def retrieval_table() -> str:
    """Accuracy in every cell with retrieval; the paper has 1.000 in all of them."""
    return accuracies(PRESENT, MIXERS, LAYERS)


def accuracies(file: str, mixers: tuple[str, ...], layers: tuple[int | None, ...]) -> str:
    """A line for each mixer and length, a column for each place of the layer and width."""
    found, lines = outcomes(file), []
    for mixer in mixers:
        for length in RESONA_LENGTHS:
            cells = [(mixer, layer, length, width) for layer in layers for width in RESONA_WIDTHS]
            lines.append([mixer, str(length), *(found.get(cell, NOT_RUN) for cell in cells)])
    places = {layer: "none" if layer is None else f"layer {layer}" for layer in layers}
    heads = [f"{places[layer]}, d {width}" for layer in layers for width in RESONA_WIDTHS]
    return table(["mixer", "L", *heads], lines)


def counts_table() -> str:
    """How the cells with retrieval came out, by width and layer: the best evaluation of each run and its last."""
    open_runs = stopped()
    rows = {cell: row for cell, row in best_rows(PRESENT).items() if cell not in open_runs}
    lines = []
    for width, layer in [(w, i) for w in RESONA_WIDTHS for i in LAYERS] + [(None, None)]:
        cells = [c for c in grid() if width is None or (c[1], c[3]) == (layer, width)]
        ended = [rows[c] for c in cells if c in rows]
        counts = [sum(row["accuracy"] >= mark for row in ended) for mark in (REACHED, STOP)]
        lowest = [min(row["accuracy"] for row in ended), min(row["history"][-1][2] for row in ended)]
        names = ["all", ""] if width is None else [str(width), str(layer)]
        lines.append([*names, *map(str, (len(cells), len(ended), *counts)), *map(share, lowest)])
    head = ["d", "layer", "cells", "ended", f"at {number(REACHED)}", f"at {number(STOP, digits=4)}", "lowest"]
    return table([*head, "lowest at the end"], lines)


def epochs_table() -> str:
    """Epochs until a run reached `STOP`, how many never did, and the steps of the slowest that did."""
    rows = rows_of(PRESENT)
    lines = []
    for mixer in MIXERS:
        for layer in LAYERS:
            found = [rows[c] for c in grid() if c[:2] == (mixer, layer) and c in rows]
            ended = [row for row in found if row["reached_at_step"] is not None]
            shown = [str(sum(row["epochs"] in epochs for row in ended)) for epochs in EPOCHS.values()]
            steps = max(row["reached_at_step"] for row in ended)
            lines.append([mixer, str(layer), str(len(found)), *shown, str(len(found) - len(ended)), f"{steps:,}"])
    return table(["mixer", "layer", "runs", *EPOCHS, NEVER, "most steps"], lines)


def again_table() -> str:
    """Every run of the cells that have several: the sweep's own and the further ones."""
    record = read(PRESENT)
    further = {spec.key for spec in runs_again(record["calls"])}
    specs = runs_by_key(record["calls"])
    rows = {row["key"]: share(row["accuracy"]) for row in record["rows"]}
    known = {entry["key"]: until_then(entry) for entry in record["left"]["again"]}
    cells = {cell_of(specs[key].model.description(), specs[key].settings): key for key in further}
    lines = []
    for key, spec in specs.items():
        cell = cell_of(spec.model.description(), spec.settings)
        if cell in cells:
            mixer, layer, length, width = cell
            run = (number(spec.learning_rate, digits=5), str(spec.training["epochs"]), str(spec.seed))
            outcome = rows.get(key, known.get(key, NOT_RUN))
            lines.append([mixer, str(layer), str(length), str(width), *run, outcome])
    return table(["mixer", "layer", "L", "d", "learning rate", "epochs at most", "seed", "accuracy"], lines, texts=1)


def both() -> list[tuple[Cell, Row, Row]]:
    """The cells that ended with both forms of the layer: (cell, without runners-up, with them)."""
    before, present = rows_of(BEFORE), rows_of(PRESENT)
    return [(cell, before[cell], present[cell]) for cell in grid() if cell in before and cell in present]


def forms_table() -> str:
    """Both forms of the layer on the cells that ended with both."""
    lines = []
    for width, layer in [(w, i) for w in RESONA_WIDTHS for i in LAYERS] + [(None, None)]:
        pairs = [(a, b) for c, a, b in both() if width is None or (c[1], c[3]) == (layer, width)]
        if not pairs:
            continue
        reached = [str(sum(pair[i]["accuracy"] >= REACHED for pair in pairs)) for i in (0, 1)]
        lowest = [share(min(pair[i]["accuracy"] for pair in pairs)) for i in (0, 1)]
        ended = [pair for pair in pairs if all(row["reached_at_step"] is not None for row in pair)]
        epochs = [f"{statistics.mean(pair[i]['epochs'] for pair in ended):.1f}" for i in (0, 1)]
        names = ["all", ""] if width is None else [str(width), str(layer)]
        lines.append([*names, str(len(pairs)), *reached, *lowest, str(len(ended)), *epochs])
    head = ["d", "layer", "cells", f"at {number(REACHED)} without", "with", "lowest without", "with"]
    return table([*head, f"both at {number(STOP, digits=4)}", "mean epochs without", "with"], lines)


def short_table() -> str:
    """The cells in which the layer without runners-up stayed below `REACHED`."""
    before, present = rows_of(BEFORE), outcomes(PRESENT)
    lines = []
    for cell in grid():
        if cell in before and before[cell]["accuracy"] < REACHED:
            mixer, layer, length, width = cell
            pair = (share(before[cell]["accuracy"]), present.get(cell, NOT_RUN))
            lines.append([mixer, str(layer), str(length), str(width), *pair])
    return table(["mixer", "layer", "L", "d", "without runners-up", "with"], lines, texts=1)


def ours_counts_table() -> str:
    """How the cells of `OURS` came out, by mixer and place of the layer."""
    rows, open_runs = rows_of(OURS), stopped(OURS)
    lines = []
    for mixer in OUR_MIXERS:
        for layer in (None, *LAYERS):
            cells = [(mixer, layer, length, d) for length in RESONA_LENGTHS for d in RESONA_WIDTHS]
            ended = [rows[cell] for cell in cells if cell in rows]
            late = sum(cell in open_runs for cell in cells if cell not in rows)
            reached = [row for row in ended if row["reached_at_step"] is not None]
            shown = [str(sum(row["epochs"] in epochs for row in reached)) for epochs in EPOCHS.values()]
            lowest = share(min(row["accuracy"] for row in ended)) if ended else ""
            counts = (len(cells), len(ended), sum(row["accuracy"] >= REACHED for row in ended))
            place = "none" if layer is None else str(layer)
            never = (len(ended) - len(reached), late, len(cells) - len(ended) - late)
            lines.append([mixer, place, *map(str, counts), lowest, *shown, *map(str, never)])
    head = ["mixer", "layer", "cells", "ended", f"at {number(REACHED)}", "lowest", *EPOCHS, NEVER, "cut off", NOT_RUN]
    return table(head, lines)


def ours_table() -> str:
    """Table 11's cells for the mixers that this toolkit enlarges; without retrieval once a run of these has ended."""
    plain = (None,) if any(cell[1] is None for cell in rows_of(OURS)) else ()
    return accuracies(OURS, OUR_MIXERS, (*plain, *LAYERS))


def timings() -> dict[str, Row]:
    """The rows of the benchmark by name."""
    return {row["name"]: row for row in json.loads(TIMINGS.read_text(encoding="utf-8"))["rows"]}


def beside(what: str) -> Iterator[tuple[str, str, tuple[Row, Row], str]]:
    """Of each model and length: title, length, the rows of `what` without and with retrieval, how much more time."""
    rows = timings()
    for name, shown in MODELS.items():
        for tokens in TIMED:
            without, with_it = (rows[f"{name}{kind}: {what} {tokens}"] for kind in ("", " with retrieval"))
            yield shown, f"{tokens // 1024}k", (without, with_it), f"{with_it['ms'] / without['ms'] - 1:.1%}"


def cost_table() -> str:
    """Time and memory of reading a text, without and with retrieval."""
    lines = [
        [shown, tokens, *(f"{row['ms']:,.1f}" for row in pair), more, *(f"{row['peak_gib']:.2f}" for row in pair)]
        for shown, tokens, pair, more in beside("reading")
    ]
    return table(["model", "tokens", "ms without", "ms with", "more", "peak GiB without", "with"], lines)


def decoding_table() -> str:
    """Time of a token after a text, without and with retrieval."""
    lines = [
        [shown, tokens, *(f"{row['ms_per_token']:.2f}" for row in pair), more]
        for shown, tokens, pair, more in beside("continuing after")
    ]
    return table(["model", "after", "ms a token without", "with", "more"], lines)


def attention_table() -> str:
    """Softmax attention of the same size."""
    rows = timings()
    lines = []
    for tokens in TIMED:
        read, step = (rows[f"{TRANSFORMER}: {what} {tokens}"] for what in ("reading", "continuing after"))
        lines.append(
            [f"{tokens // 1024}k", f"{read['ms']:,.1f}", f"{read['peak_gib']:.2f}", f"{step['ms_per_token']:.2f}"]
        )
    return table(["tokens", "ms to read", "peak GiB", "ms a token after"], lines, texts=1)


def paper_table() -> str:
    """The overhead that the paper's times amount to."""
    names = list(PAPER_PREFILL[TIMED[0]])
    lines = [
        [f"{tokens // 1024}k", *(f"{found[name][1] / found[name][0] - 1:.0%}" for name in names)]
        for tokens, found in PAPER_PREFILL.items()
    ]
    return table(["tokens", *names], lines, texts=1)


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker; of a sweep that is not on record there is none."""
    ours = {"ours": ours_table, "ours counts": ours_counts_table}
    some = {name: made() for name, made in ours.items() if (pages.RESULTS / OURS).exists()}
    if "again" in read(PRESENT)["calls"]:
        some["again"] = again_table()
    return some | {
        "counts": counts_table(),
        "with retrieval": retrieval_table(),
        **report_controls.tables(),
        "epochs": epochs_table(),
        "both forms": forms_table(),
        "fell short": short_table(),
        "cost": cost_table(),
        "cost of decoding": decoding_table(),
        "cost of attention": attention_table(),
        "cost in the paper": paper_table(),
        **(report_selector.tables() if (pages.RESULTS / HARD).exists() else {}),
        **(report_mad.tables() if (pages.RESULTS / report_mad.RECORD).exists() else {}),
        **(report_perplexity.tables() if (pages.RESULTS / report_perplexity.RECORD).exists() else {}),
    }


def draw(folder: Path) -> None:
    """The figure of the page."""
    from experiments.retrieval.figures import draw

    draw(folder)


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables, draw)
