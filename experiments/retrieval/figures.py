"""The figure of docs/retrieval_evidence.md, made to be read in black and white too."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot as plt

from experiments.common.plotting import STYLE, finish, panels
from experiments.retrieval.cells import LAYERS, MIXERS, PRESENT, Cell, best_rows, controls, published
from longrecall.tasks.published import RESONA_LENGTHS, RESONA_TABLE_11_WITH_RETRIEVAL, RESONA_WIDTHS

LOOKS: dict[str, tuple[str, str]] = {
    "base_conv": ("#7a7a7a", "v"),
    "h3": ("#b45309", "^"),
    "hyena": ("#c2410c", "D"),
    "rwkv5": ("#7c3aed", "P"),
    "mamba": ("#15803d", "o"),
    "mamba2": ("#0053a6", "s"),
}
"""Colour and marker of each mixer."""


def mean_over_widths(of: Callable[[Cell], float], mixer: str, layers: tuple[int | None, ...]) -> list[float]:
    """Accuracy by length, the mean over the widths and the places of the layer."""
    return [
        statistics.mean(of((mixer, layer, length, width)) for layer in layers for width in RESONA_WIDTHS)
        for length in RESONA_LENGTHS
    ]


def recall_figure(path: Path) -> None:
    """Accuracy by length with the layer (full lines) and without (dashed), here and in the paper."""
    rows, alike = best_rows(PRESENT), controls()[0]
    sources: dict[str, tuple[Callable[[Cell], float], Callable[[Cell], float]]] = {
        "here, trained alike": (
            lambda cell: float(rows[cell]["accuracy"]),
            lambda cell: float(alike[cell]["accuracy"]),
        ),
        "the paper, best of four rates": (
            lambda _: RESONA_TABLE_11_WITH_RETRIEVAL,
            lambda cell: float(published(cell[0], *cell[2:])),
        ),
    }
    places = range(len(RESONA_LENGTHS))
    with plt.rc_context(STYLE):
        figure, axes = panels(len(sources))
        for axis, (name, (with_it, without)) in zip(axes, sources.items(), strict=True):
            for mixer in MIXERS:
                colour, marker = LOOKS[mixer]
                axis.plot(places, mean_over_widths(with_it, mixer, LAYERS), color=colour, marker=marker, label=mixer)
                axis.plot(places, mean_over_widths(without, mixer, (None,)), color=colour, marker=marker, ls="--")
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("length of the row L")
            axis.set_xticks(list(places), [str(length) for length in RESONA_LENGTHS])
        axes[0].set_ylabel("share of values recalled")
        finish(figure, axes[0], path)


def draw(folder: Path) -> None:
    """Draw the figure of the page."""
    recall_figure(folder / "retrieval_recall.svg")
