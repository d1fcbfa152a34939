"""The plot of training runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from longrecall.report.drawing import (
    SETTINGS,
    WIDTH,
    add_legend,
    line_style,
    to_svg,
)
from longrecall.report.inputs import Training


def training_plot(trainings: Sequence[Training], labels: Sequence[str], name: str) -> str:
    """Return loss by tokens seen (or steps, where tokens were not logged): every logged value and its running mean.

    `labels` are those of the page's evaluations: a run of the same label looks like them in every plot.
    """
    order = list(dict.fromkeys([*labels, *(training.label for training in trainings)]))
    unit = "tokens" if all("tokens" in row for training in trainings for row in training.log) else "step"
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        for training in trainings:
            x = np.array([row[unit] for row in training.log], dtype=float)
            y = np.array([row["loss"] for row in training.log], dtype=float)
            style = line_style(order.index(training.label)) | {
                "markevery": max(1, len(x) // 8),
            }
            if len(x) > 40:
                axes.plot(x, y, color=style["color"], alpha=0.25, linewidth=0.8)
            axes.plot(x, running_mean(y), **style)
        axes.set_xlabel("tokens seen" if unit == "tokens" else "step")
        axes.set_ylabel("training loss (nats per token)")
        axes.xaxis.set_major_formatter(lambda value, _: _amount(value))
        axes.grid(axis="y")
        add_legend(figure, [(order.index(training.label), training.label) for training in trainings])
        return to_svg(figure, name, "Training loss by tokens seen, a line per run")


def running_mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the mean over a centred window of a twentieth of the curve, shorter at both ends."""
    half = len(values) // 40
    total = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return np.asarray((total[last] - total[first]) / (last - first))


def _amount(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
