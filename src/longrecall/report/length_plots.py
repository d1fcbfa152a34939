"""Plots by length: the charts that tasks declare, stories (babilong), and any other task with a length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longrecall.report.drawing import (
    INK,
    SETTINGS,
    WIDTH,
    accuracy_axes,
    accuracy_line,
    add_legend,
    heat_map_grid,
    mark,
    measured,
    to_svg,
)
from longrecall.report.inputs import Evaluation, Measurement
from longrecall.report.summaries import mean
from longrecall.tasks.declaration import LineChart
from longrecall.units import format_length


def line_chart(evaluations: Sequence[Evaluation], task: str, chart: LineChart, trained: Sequence[int]) -> str:
    """Return shares along a number of the cells, a panel per metric, a line per file.

    `trained`: how far training went, marked where it is known.
    """
    metrics = [metric for metric in chart.metrics if any(entry.of(task, metric) for entry in evaluations)]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
        grid = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(grid, metrics, strict=True):
            for index, evaluation in enumerate(evaluations):
                accuracy_line(axes, index, len(evaluations), chart.along, evaluation.of(task, metric))
            ticks = {m.cell[chart.along] for entry in evaluations for m in entry.of(task, metric)}
            accuracy_axes(axes, ticks, chart.axis)
            for place in trained:
                mark(axes, place, f"trained to {place}")
            axes.set_title(chart.metrics[metric], loc="left")
        grid[0].set_ylabel(chart.share)
        add_legend(figure, measured(evaluations, task, metrics[0]))
        return to_svg(figure, task, chart.title)


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


def babilong_heat_maps(evaluations: Sequence[Evaluation], trained: Mapping[str, int], name: str) -> str:
    """Return one map per file: accuracy (in numbers and as a shade) by task and length.

    `trained`: label -> tokens of the training context; a line stands after the last length within it.
    """
    cells = [m.cell for entry in evaluations for m in entry.of("babilong", "accuracy")]
    lengths, tasks = (sorted({cell[key] for cell in cells}) for key in ("length", "task"))
    maps = {}
    for evaluation in evaluations:
        values = maps[evaluation.label] = np.full((len(tasks), len(lengths)), np.nan)
        for m in evaluation.of("babilong", "accuracy"):
            if m.value is not None:
                values[tasks.index(m.cell["task"]), lengths.index(m.cell["length"])] = m.value

    def mark_trained(axes: Axes, label: str) -> None:
        context = trained.get(label)
        within = sum(length <= context for length in lengths) if context else 0
        if context and within < len(lengths):
            axes.axvline(within, color=INK, linewidth=2.0, linestyle=(0, (3, 1.5)))
            axes.set_title(f"trained on {format_length(context)}", loc="right", fontsize=8, fontweight="normal")

    title = "Stories: share of questions answered by type of story and length of the text"
    return heat_map_grid(maps, lengths, tasks, ("length in tokens", ""), name, title, finish=mark_trained)
