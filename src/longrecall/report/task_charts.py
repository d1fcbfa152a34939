"""The drawings of the charts that tasks declare (`longrecall.tasks.charts`), for any task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    line_with_bars,
    mark,
    measured,
    to_svg,
)
from longrecall.report.inputs import Evaluation, Measurement
from longrecall.report.summaries import Number, mean
from longrecall.tasks.charts import Chart, LineChart, MeanChart, PanelChart, RangeChart, ShareMap
from longrecall.units import format_length

MOST_PANELS = 4
"""Panels that a row of small plots holds; the rest stands in the data table only."""


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
        return to_svg(figure, _name(task, chart), chart.title)


def panel_chart(evaluations: Sequence[Evaluation], task: str, chart: PanelChart) -> str:
    """Return shares along a number of the cells, a panel for each value of another one, a line per file."""
    places = sorted({m.cell.get(chart.panels, 0) for e in evaluations for m in e.of(task, chart.metric)})
    shown = places[:MOST_PANELS]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
        grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, place in zip(grid, shown, strict=True):
            for index, evaluation in enumerate(evaluations):
                cells = [m for m in evaluation.of(task, chart.metric) if m.cell.get(chart.panels, 0) == place]
                accuracy_line(axes, index, len(evaluations), chart.along, cells)
            cells = [m for e in evaluations for m in e.of(task, chart.metric)]
            accuracy_axes(axes, {m.cell[chart.along] for m in cells if chart.along in m.cell}, chart.axis)
            if len(places) > 1 or place:
                axes.set_title(chart.panel_title(place), loc="left")
        grid[0].set_ylabel(chart.share)
        add_legend(figure, measured(evaluations, task, chart.metric))
        return to_svg(figure, _name(task, chart), chart.title)


def mean_chart(evaluations: Sequence[Evaluation], task: str, chart: MeanChart) -> str:
    """Return shares along a number of the cells, the mean over all else, a line per file."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        for index, evaluation in enumerate(evaluations):
            points = [
                Measurement(task, {chart.along: place}, chart.metric, number.value, number.low, number.high, 0)
                for place, number in means_along(evaluation, task, chart).items()
            ]
            accuracy_line(axes, index, len(evaluations), chart.along, points)
        ticks = {m.cell[chart.along] for e in evaluations for m in e.of(task, chart.metric)}
        accuracy_axes(axes, ticks, chart.axis)
        axes.set_ylabel(chart.share)
        add_legend(figure, measured(evaluations, task, chart.metric))
        return to_svg(figure, _name(task, chart), chart.title)


def means_along(evaluation: Evaluation, task: str, chart: MeanChart) -> dict[float, Number]:
    """Return the mean for each place along the chart, with its interval."""
    cells = evaluation.of(task, chart.metric)
    places = sorted({m.cell[chart.along] for m in cells})
    return {place: mean(m for m in cells if m.cell[chart.along] == place) for place in places}


def share_map(evaluations: Sequence[Evaluation], task: str, chart: ShareMap) -> str:
    """Return one map per file: shares, in numbers and as a shade, by two keys of the cells.

    Cells of one place that differ in something else are averaged. A line stands after the last length that is within
    the training context of a checkpoint, where the chart asks for it.
    """
    cells = [m.cell for entry in evaluations for m in entry.of(task, chart.metric)]
    columns, rows = (sorted({cell[key] for cell in cells}) for key in (chart.along, chart.rows))
    maps = {}
    for evaluation in evaluations:
        values = maps[evaluation.label] = np.full((len(rows), len(columns)), np.nan)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                here = [m for m in evaluation.of(task, chart.metric) if m.cell[chart.along] == column]
                share = mean(m for m in here if m.cell[chart.rows] == row).value
                values[i, j] = np.nan if share is None else share
    trained = _training_contexts(evaluations) if chart.trained else {}

    def mark_trained(axes: Axes, label: str) -> None:
        context = trained.get(label)
        within = sum(length <= context for length in columns) if context else 0
        if context and within < len(columns):
            axes.axvline(within, color=INK, linewidth=2.0, linestyle=(0, (3, 1.5)))
            axes.set_title(f"trained on {format_length(context)}", loc="right", fontsize=8, fontweight="normal")

    texts = [chart.row_text(row) for row in rows]
    return heat_map_grid(maps, columns, texts, chart.axes, _name(task, chart), chart.title, finish=mark_trained)


def _training_contexts(evaluations: Sequence[Evaluation]) -> Mapping[str, int]:
    """Return label -> tokens of the training context, of the files that say it."""
    found = {entry.label: entry.data["checkpoint"].get("context_length") for entry in evaluations}
    return {label: context for label, context in found.items() if isinstance(context, int)}


def range_chart(evaluations: Sequence[Evaluation], task: str, chart: RangeChart) -> str:
    """Return a quantity by range of positions in the text, a line per file."""
    ranges = sorted({_span(m, chart) for e in evaluations for m in e.of(task, chart.metric)})
    place = {span: index for index, span in enumerate(ranges)}
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        for index, evaluation in enumerate(evaluations):
            shift = 0.035 * (index - (len(evaluations) - 1) / 2)
            points = [(place[_span(m, chart)] + shift, m) for m in evaluation.of(task, chart.metric)]
            line_with_bars(axes, index, sorted(points, key=lambda point: point[0]))
        axes.set_xticks(range(len(ranges)), _range_texts(ranges))
        if len(ranges) > 7:
            axes.tick_params(axis="x", rotation=35)
        axes.set_xlabel(chart.axis)
        axes.set_ylabel(chart.quantity)
        axes.grid(axis="y")
        add_legend(figure, measured(evaluations, task, chart.metric))
        return to_svg(figure, _name(task, chart), chart.title)


def _span(measurement: Measurement, chart: RangeChart) -> tuple[float, float]:
    start, end = (measurement.cell[key] for key in chart.ends)
    return start, end


def _range_texts(ranges: Iterable[tuple[float, float]]) -> list[str]:
    return ["–".join(format_length(int(place)) if place else "0" for place in span) for span in ranges]


def _name(task: str, chart: Chart) -> str:
    return chart.name or task
