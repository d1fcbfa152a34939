"""What the figures of the pages share: one look, panels side by side, one legend below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

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


def panels(count: int = 2, one_scale: bool = True) -> tuple[Any, Any]:
    """A figure of panels side by side, with one scale or one each."""
    figure, axes = plt.subplots(1, count, figsize=(7.6, 3.3), sharey=one_scale)
    for axis in axes:
        axis.grid(axis="y", color="0.9", linewidth=0.6)
    return figure, axes


def finish(figure: Any, axis: Any, path: Path) -> None:
    """One legend below the panels; an SVG without a date, so that a rerun changes nothing."""
    handles, labels = axis.get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=8, columnspacing=1.2)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
