"""The two figures of docs/evidence.md, made to be read in black and white too; report_evidence.py calls this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from report_evidence import ARMS, STUDIES, bits, read, rows_of, share, spans

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LOOKS: dict[str, tuple[str, str, str]] = {
    "base": ("0.55", "", ":"),
    "plain": ("black", "o", "-"),
    "reinit": ("#0053a6", "s", "-"),
    "handover": ("#c2410c", "D", "-"),
    "preserve": ("#15803d", "^", "--"),
    "perturb": ("#7e22ce", "v", "--"),
    "inherit": ("0.45", "x", "--"),
}
"""Colour, marker and line of each arm: the marker alone tells them apart."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longrecall",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 5,
    "lines.linewidth": 1.3,
}


def recall_figure(path: Path) -> None:
    """Recall of one-letter phone books by number of pairs, without and with state passing, with 95% intervals."""
    study = read(STUDIES["mamba2_one_letter"])
    cells = [c for c in study["results"][0]["phonebook"] if int(c) > 1]
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3), sharey=True)
    for axis, passing in zip(axes, (False, True), strict=True):
        for place, arm in enumerate(["base", *sorted(ARMS, key=list(LOOKS).index)]):
            colour, marker, line = LOOKS[arm]
            found = [share(rows_of(study, arm, None if arm == "base" else passing), "phonebook", c) for c in cells]
            # Side by side, or the error bars of neighbours hide each other.
            at = [x + 0.07 * (place - 3) for x in range(len(cells))]
            ends = [[v - low for v, low, _, _ in found], [high - v for v, _, high, _ in found]]
            label = {"base": "before", "plain": "not enlarged"}.get(arm, arm)
            axis.errorbar(
                at,
                [f[0] for f in found],
                ends,
                color=colour,
                marker=marker,
                linestyle=line,
                elinewidth=0.7,
                label=label,
            )
        axis.set_title(f"state passing {'on, probability .25' if passing else 'off'}", fontsize=9)
        axis.set_xticks(range(len(cells)), cells)
        axis.set_xlabel("pairs in the phone book")
        axis.grid(axis="y", color="0.9", linewidth=0.6)
    axes[0].set_ylim(0.2, 1.02)
    axes[0].set_ylabel("share recalled")
    finish(figure, axes[0], path)


def bits_figure(path: Path) -> None:
    """Bits per byte by position for plain, reinit and handover, with and without state passing."""
    titles = {
        "mamba2_two_letter": "two-letter books, passing: 1.0",
        "mamba2_one_letter": "one-letter books, passing: .25",
    }
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3), sharey=True)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        study = read(STUDIES[name])
        for arm in ("plain", "reinit", "handover"):
            colour, marker, _ = LOOKS[arm]
            for passing in (False, True):
                axis.plot(
                    bits(rows_of(study, arm, passing)),
                    color=colour,
                    marker=marker,
                    linestyle="-" if passing else ":",
                    markerfacecolor=colour if passing else "white",
                    label=f"{arm}, passing {'on' if passing else 'off'}",
                )
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(spans(study))), spans(study), rotation=35, ha="right", fontsize=8)
        axis.set_xlabel("position in the text (tokens)")
        axis.grid(axis="y", color="0.9", linewidth=0.6)
    axes[0].set_ylabel("bits per byte")
    finish(figure, axes[0], path)


def finish(figure: Any, axis: Any, path: Path) -> None:
    """One legend below both panels; an SVG without a date, so that a rerun changes nothing."""
    handles, labels = axis.get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=7 if len(labels) == 7 else 3, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def draw(folder: Path) -> None:
    """Write recall.svg and bits_per_byte.svg into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        recall_figure(folder / "recall.svg")
        bits_figure(folder / "bits_per_byte.svg")
