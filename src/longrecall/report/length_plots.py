"""The plot by length of the tasks that declare no charts of their own."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from longrecall.report.drawing import (
    SETTINGS,
    WIDTH,
    accuracy_axes,
    accuracy_line,
    add_legend,
    to_svg,
)
from longrecall.report.inputs import Evaluation, Measurement
from longrecall.report.summaries import mean


def task_lines(evaluations: Sequence[Evaluation], tasks: Sequence[tuple[str, str]], name: str) -> str:
    """Return shares by length, the mean over all else, a panel per (task, metric), a line per file."""
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 0.6 + 2.3 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes in grid.flat[len(tasks) :]:
            axes.set_visible(False)
        for place, (task, metric) in enumerate(tasks):
            axes = grid.flat[place]
            lengths = sorted({m.cell["length"] for entry in evaluations for m in entry.of(task, metric)})
            for index, evaluation in enumerate(evaluations):
                accuracy_line(axes, index, len(evaluations), "length", by_length(evaluation, task, metric))
            accuracy_axes(axes, lengths, "length in tokens" if place + columns >= len(tasks) else "")
            axes.set_title(task, loc="left", fontsize=9)
            if len(lengths) > 4:
                axes.tick_params(axis="x", rotation=35)
            if place % columns == 0:
                axes.set_ylabel("share right")
        shown = [i for i, entry in enumerate(evaluations) if any(entry.of(task, metric) for task, metric in tasks)]
        add_legend(figure, [(index, evaluations[index].label) for index in shown])
        return to_svg(figure, name, "Share right by length of the text, a panel per task, a line per result file")


def by_length(evaluation: Evaluation, task: str, metric: str) -> list[Measurement]:
    """Return one measurement per length: the mean over the cells of that length."""
    cells = evaluation.of(task, metric)
    found = []
    for length in sorted({m.cell["length"] for m in cells}):
        number = mean(m for m in cells if m.cell["length"] == length)
        found.append(Measurement(task, {"length": length}, metric, number.value, number.low, number.high, 0))
    return found
