"""Plots of the tasks that every report may hold, and of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from longrecall.report.drawing import (
    SETTINGS,
    WIDTH,
    accuracy_axes,
    accuracy_line,
    add_legend,
    heat_map_grid,
    line_style,
    line_with_bars,
    measured,
    to_svg,
)
from longrecall.report.inputs import Evaluation, Measurement, Training
from longrecall.report.summaries import Number, mean
from longrecall.units import format_length

MOST_PANELS = 4
"""Panels that a row of small plots holds; further distances stand in the data table only."""


def phonebook_plot(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return accuracy by number of pairs, a panel per distance, a line per file."""
    distances = sorted({m.cell.get("distance", 0) for e in evaluations for m in e.of("phonebook", "accuracy")})
    shown = distances[:MOST_PANELS]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
        grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, distance in zip(grid, shown, strict=True):
            for index, evaluation in enumerate(evaluations):
                cells = [m for m in evaluation.of("phonebook", "accuracy") if m.cell.get("distance", 0) == distance]
                accuracy_line(axes, index, len(evaluations), "pairs", cells)
            ticks = {m.cell["pairs"] for e in evaluations for m in e.of("phonebook", "accuracy") if "pairs" in m.cell}
            accuracy_axes(axes, ticks, "pairs in the book")
            if len(distances) > 1 or distance:
                axes.set_title(f"{distance:,.0f} tokens between" if distance else "no text between", loc="left")
        grid[0].set_ylabel("share recalled")
        add_legend(figure, measured(evaluations, "phonebook", "accuracy"))
        return to_svg(figure, name, "Recall by number of pairs: share of queries answered, a line per result file")


def depth_maps(evaluations: Sequence[Evaluation], task: str, metric: str, name: str, title: str) -> str:
    """Return one map per file: shares (in numbers and as a shade) by length and depth of the needle.

    Cells of one length and depth that differ in something else are averaged.
    """
    lengths = sorted({m.cell["length"] for e in evaluations for m in e.of(task, metric)})
    depths = sorted({m.cell["depth"] for e in evaluations for m in e.of(task, metric)})
    maps = {}
    for evaluation in evaluations:
        values = maps[evaluation.label] = np.full((len(depths), len(lengths)), np.nan)
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                here = [m for m in evaluation.of(task, metric) if m.cell["length"] == length]
                share = mean(m for m in here if m.cell["depth"] == depth).value
                values[row, column] = np.nan if share is None else share
    rows = [f"{depth:.0%}" for depth in depths]
    return heat_map_grid(maps, lengths, rows, ("length in tokens", "depth of the needle"), name, title)


def passkey_by_length(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return accuracy by length, the mean over depths, a line per file."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        lengths = {m.cell["length"] for e in evaluations for m in e.of("passkey", "accuracy")}
        for index, evaluation in enumerate(evaluations):
            points = [
                Measurement("passkey", {"length": length}, "accuracy", number.value, number.low, number.high, 0)
                for length, number in mean_by_length(evaluation).items()
            ]
            accuracy_line(axes, index, len(evaluations), "length", points)
        accuracy_axes(axes, lengths, "length in tokens")
        axes.set_ylabel("share recalled")
        add_legend(figure, measured(evaluations, "passkey", "accuracy"))
        return to_svg(
            figure, name, "Passkey: share of keys recalled by length, mean over depths, a line per result file"
        )


def mean_by_length(evaluation: Evaluation) -> dict[float, Number]:
    """Return passkey accuracy per length, averaged over depths, with its interval."""
    cells = evaluation.of("passkey", "accuracy")
    lengths = sorted({m.cell["length"] for m in cells})
    return {length: mean(m for m in cells if m.cell["length"] == length) for length in lengths}


def position_plot(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return bits per byte by position in the text, a line per file; lower is better."""
    ranges = position_ranges(evaluations)
    place = {span: index for index, span in enumerate(ranges)}
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        for index, evaluation in enumerate(evaluations):
            cells = evaluation.of("bits_per_byte", "bits_per_byte")
            shift = 0.035 * (index - (len(evaluations) - 1) / 2)
            points = [(place[_span(m)] + shift, m) for m in cells]
            line_with_bars(axes, index, sorted(points, key=lambda point: point[0]))
        axes.set_xticks(range(len(ranges)), [f"{_short(start)}–{_short(end)}" for start, end in ranges])
        if len(ranges) > 7:
            axes.tick_params(axis="x", rotation=35)
        axes.set_xlabel("position in the text, in tokens")
        axes.set_ylabel("bits per byte (lower is better)")
        axes.grid(axis="y")
        add_legend(figure, measured(evaluations, "bits_per_byte", "bits_per_byte"))
        return to_svg(figure, name, "Bits per byte by position in the text, a line per result file; lower is better")


def position_ranges(evaluations: Iterable[Evaluation]) -> list[tuple[float, float]]:
    """Return every [start, end) range of positions that some file measured, in order."""
    return sorted({_span(m) for e in evaluations for m in e.of("bits_per_byte", "bits_per_byte")})


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


def _span(measurement: Measurement) -> tuple[float, float]:
    return measurement.cell["start"], measurement.cell["end"]


def _short(position: float) -> str:
    return format_length(int(position)) if position else "0"


def _amount(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
