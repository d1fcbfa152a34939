"""Plots of the tasks that show length generalization: copying and stories (babilong)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from longrecall.report.drawing import (
    INK,
    SETTINGS,
    WIDTH,
    accuracy_axes,
    accuracy_line,
    add_legend,
    heat_map,
    mark,
    measured,
    to_svg,
)
from longrecall.report.inputs import Evaluation
from longrecall.units import format_length

COPIED = {"accuracy": "whole strings", "character_accuracy": "single letters"}
"""Metrics of copying, in words."""


def copying_plot(evaluations: Sequence[Evaluation], trained: Sequence[int], name: str) -> str:
    """Return accuracy by length of the string, a panel per metric, a line per file; `trained` lengths are marked."""
    metrics = [metric for metric in COPIED if any(entry.of("copying", metric) for entry in evaluations)]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
        grid = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(grid, metrics, strict=True):
            for index, evaluation in enumerate(evaluations):
                accuracy_line(axes, index, len(evaluations), "length", evaluation.of("copying", metric))
            lengths = {m.cell["length"] for entry in evaluations for m in entry.of("copying", metric)}
            accuracy_axes(axes, lengths, "letters of the string")
            for letters in trained:
                mark(axes, letters, f"trained to {letters}")
            axes.set_title(COPIED[metric], loc="left")
        grid[0].set_ylabel("share copied")
        add_legend(figure, measured(evaluations, "copying", metrics[0]))
        return to_svg(figure, name, "Copying: share copied rightly by length of the string, a line per result file")


def babilong_heat_maps(evaluations: Sequence[Evaluation], trained: Mapping[str, int], name: str) -> str:
    """Return one map per file: accuracy (in numbers and as a shade) by task and length.

    `trained`: label -> tokens of the training context; a line stands after the last length within it.
    """
    cells = [m.cell for entry in evaluations for m in entry.of("babilong", "accuracy")]
    lengths, tasks = (sorted({cell[key] for cell in cells}) for key in ("length", "task"))
    columns = min(len(evaluations), 2 if len(lengths) > 3 else 3)
    rows = -(-len(evaluations) // columns)
    with mpl.rc_context({**SETTINGS, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(WIDTH, rows * (0.95 + 0.34 * len(tasks))), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for place, axes in enumerate(grid.flat):
            if place >= len(evaluations):
                axes.set_visible(False)
                continue
            evaluation = evaluations[place]
            values = np.full((len(tasks), len(lengths)), np.nan)
            for m in evaluation.of("babilong", "accuracy"):
                if m.value is not None:
                    values[tasks.index(m.cell["task"]), lengths.index(m.cell["length"])] = m.value
            heat_map(axes, values, lengths, tasks, evaluation.label)
            context = trained.get(evaluation.label)
            within = sum(length <= context for length in lengths) if context else 0
            if context and within < len(lengths):
                axes.axvline(within, color=INK, linewidth=2.0, linestyle=(0, (3, 1.5)))
                axes.set_title(f"trained on {format_length(context)}", loc="right", fontsize=8, fontweight="normal")
            if place + columns >= len(evaluations):
                axes.set_xlabel("length in tokens")
                axes.tick_params(labelbottom=True)
        return to_svg(figure, name, "Stories: share of questions answered by type of story and length of the text")
