"""Turn the recorded sweeps of table 11 and the timings of retrieval into the tables of docs/retrieval_evidence.md.

Usage: python experiments/report_retrieval.py            rewrites what stands between the markers
       python experiments/report_retrieval.py --check    changes nothing; exit code 1 when a table is out of date

The table is that of the RESONA paper. A cell is a mixer, a place of the retrieval layer (None = none), a length and a
width: one run each, so no number here has an interval. A run ends at `STOP`; a cell whose run was still going when the
time was up, or had not begun, says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

import pages
from pages import number, read, table

from longrecall.report.sweeps import published_mqar
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_WIDTHS

PRESENT = "mqar_table11.json"
BEFORE = "mqar_table11_without_runners_up.json"
TIMINGS = pages.HERE.parent / "benchmarks" / "results" / "gpu_retrieval.json"
MIXERS = ("base_conv", "h3", "hyena", "rwkv5", "mamba", "mamba2")
LAYERS = (0, 2)
REACHED = 0.999
"""Accuracy that the page counts; `STOP` ends a run."""
STOP = 0.9995
EPOCHS = {"1 epoch": range(1, 2), "2": range(2, 3), "3–5": range(3, 6), "6–24": range(6, 25)}
MODELS = {"gla_1.3b": "GLA", "mamba2_1.3b": "Mamba-2", "gated_delta_net_1.5b": "Gated DeltaNet"}
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
Cell = tuple[str, int | None, int, int]
Row = Mapping[str, Any]


def rows_of(file: str) -> dict[Cell, Row]:
    """The rows of one recorded sweep by (mixer, layer with retrieval, length, width)."""
    found: dict[Cell, Row] = {}
    for row in read(file)["rows"]:
        model = row["model"]
        layer = None if model["retrieval"] is None else model["retrieval"]["layer"]
        cell = (model["mixer"], layer, row["settings"]["length"], model["hidden_size"])
        if cell in found:
            raise ValueError(f"{file}: two rows of {cell}")
        found[cell] = row
    return found


def left() -> dict[Cell, str]:
    """What became of the cells with retrieval that have no row."""
    words = {"cut_off": "cut off", "not_started": "not run"}
    return {
        (cell["mixer"], cell["layer"], cell["length"], cell["width"]): words[state]
        for state, cells in read(PRESENT)["left"].items()
        for cell in cells
    }


def grid(layers: tuple[int | None, ...] = LAYERS) -> list[Cell]:
    """Every cell of table 11, mixer by mixer."""
    return [(m, i, length, d) for m in MIXERS for i in layers for length in RESONA_LENGTHS for d in RESONA_WIDTHS]


def share(value: float) -> str:
    """An accuracy to four decimals, cut off and not rounded: what falls short of 1 shows."""
    return number(int(value * 10_000 + 1e-6) / 10_000, digits=4)


def retrieval_table() -> str:
    """Accuracy in every cell with retrieval; the paper has 1.000 in all of them."""
    rows, states = rows_of(PRESENT), left()
    lines = []
    for mixer in MIXERS:
        for length in RESONA_LENGTHS:
            cells = [(mixer, layer, length, width) for layer in LAYERS for width in RESONA_WIDTHS]
            lines.append([mixer, str(length), *(share(rows[c]["accuracy"]) if c in rows else states[c] for c in cells)])
    heads = [f"layer {layer}, d {width}" for layer in LAYERS for width in RESONA_WIDTHS]
    return table(["mixer", "L", *heads], lines)


def counts_table() -> str:
    """How many cells with retrieval were run, by width and layer."""
    rows, states = rows_of(PRESENT), left()
    lines = []
    for width, layer in [(w, i) for w in RESONA_WIDTHS for i in LAYERS] + [(None, None)]:
        cells = [c for c in grid() if width is None or (c[1], c[3]) == (layer, width)]
        ended = [c for c in cells if c in rows]
        reached = sum(rows[c]["accuracy"] >= REACHED for c in ended)
        open_cells = [sum(states.get(c) == word for c in cells) for word in ("cut off", "not run")]
        names = ["all", ""] if width is None else [str(width), str(layer)]
        lines.append([*names, *map(str, (len(cells), len(ended), reached, *open_cells))])
    return table(["d", "layer", "cells", "ended", f"at {number(REACHED)}", "cut off", "not run"], lines)


def plain(row: Row | None, mixer: str, length: int, width: int) -> tuple[str, str]:
    """(ours, published) accuracy of a cell without retrieval."""
    model = {"mixer": mixer, "hidden_size": width, "layers": 4, "retrieval": None}
    published = published_mqar(model, {"length": length, "pairs": length // 16})
    if published is None:
        raise ValueError(f"nothing is published for {mixer}, length {length}, width {width}")
    return "not run" if row is None else number(row["accuracy"]), number(published)


def baselines_table() -> str:
    """Accuracy without retrieval, ours and the paper's."""
    rows = rows_of(PRESENT)
    lines = []
    for mixer in MIXERS:
        for length in RESONA_LENGTHS:
            cells = [plain(rows.get((mixer, None, length, width)), mixer, length, width) for width in RESONA_WIDTHS]
            lines.append([mixer, str(length), *(" / ".join(cell) for cell in cells)])
    return table(["mixer", "L", *(f"d {width}" for width in RESONA_WIDTHS)], lines)


def epochs_table() -> str:
    """Epochs until the end of a run, and the steps of the slowest."""
    rows = rows_of(PRESENT)
    lines = []
    for mixer in MIXERS:
        for layer in LAYERS:
            found = [rows[c] for c in grid() if c[:2] == (mixer, layer) and c in rows]
            shown = [str(sum(row["epochs"] in epochs for row in found)) for epochs in EPOCHS.values()]
            steps = [row["reached_at_step"] for row in found]
            lines.append([mixer, str(layer), str(len(found)), *shown, f"{max(steps):,}"])
    return table(["mixer", "layer", "runs", *EPOCHS, "most steps"], lines)


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
    before, present, states = rows_of(BEFORE), rows_of(PRESENT), left()
    lines = []
    for cell in grid():
        if cell in before and before[cell]["accuracy"] < REACHED:
            after = share(present[cell]["accuracy"]) if cell in present else states[cell]
            mixer, layer, length, width = cell
            lines.append([mixer, str(layer), str(length), str(width), share(before[cell]["accuracy"]), after])
    return table(["mixer", "layer", "L", "d", "without runners-up", "with"], lines, texts=1)


def timings() -> dict[str, Row]:
    """The rows of the benchmark by name."""
    return {row["name"]: row for row in json.loads(TIMINGS.read_text(encoding="utf-8"))["rows"]}


def cost_table() -> str:
    """Time and memory of reading a text, without and with retrieval."""
    rows = timings()
    lines = []
    for name, shown in MODELS.items():
        for tokens in TIMED:
            without, with_it = (rows[f"{name}{kind}: reading {tokens}"] for kind in ("", " with retrieval"))
            overhead = with_it["ms"] / without["ms"] - 1
            times = [f"{row['ms']:,.1f}" for row in (without, with_it)]
            memory = [f"{row['peak_gib']:.2f}" for row in (without, with_it)]
            lines.append([shown, f"{tokens // 1024}k", *times, f"{overhead:.1%}", *memory])
    return table(["model", "tokens", "ms without", "ms with", "more", "peak GiB without", "with"], lines)


def paper_table() -> str:
    """The overhead that the paper's times amount to."""
    names = list(PAPER_PREFILL[TIMED[0]])
    lines = [
        [f"{tokens // 1024}k", *(f"{found[name][1] / found[name][0] - 1:.0%}" for name in names)]
        for tokens, found in PAPER_PREFILL.items()
    ]
    return table(["tokens", *names], lines, texts=1)


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker."""
    return {
        "counts": counts_table(),
        "with retrieval": retrieval_table(),
        "without retrieval": baselines_table(),
        "epochs": epochs_table(),
        "both forms": forms_table(),
        "fell short": short_table(),
        "cost": cost_table(),
        "cost in the paper": paper_table(),
    }


if __name__ == "__main__":
    pages.write_page(__doc__, "retrieval_evidence.md", tables)
