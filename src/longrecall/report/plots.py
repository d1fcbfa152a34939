"""Plots as inline SVG: one look, told apart by colour, marker and line, so that they survive a grey printer."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from longrecall.report.inputs import Evaluation, Measurement, Training
from longrecall.report.summaries import Number, mean
from longrecall.units import format_length

# Dark to light, so that neighbours differ in grey too; after Okabe and Ito's colours for every eye.
_COLOURS = ("#5b5b5b", "#00548f", "#c45a00", "#00805f", "#a83a80", "#2f9fd6", "#8a6d00", "#1b1b1b")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES: tuple[Any, ...] = ((0, (4, 2)), "-", (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
_INK, _FAINT = "#222222", "#d4d4d4"
_SETTINGS: Any = {
    "svg.fonttype": "none",
    # A label is a label: dollars start no formula.
    "text.parse_math": False,
    "svg.hashsalt": "longrecall",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
}
_PAGE_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_WIDTH = 7.6
MOST_PANELS = 4
"""Panels that a row of small plots holds; further distances stand in the data table only."""


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and line of the series at `index`, the same in every plot of a page."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "linewidth": 1.7,
        "markersize": 5.5,
    }


def phonebook_plot(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return accuracy by number of pairs, a panel per distance, a line per file."""
    distances = sorted({m.cell.get("distance", 0) for e in evaluations for m in e.of("phonebook", "accuracy")})
    shown = distances[:MOST_PANELS]
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, 3.7), layout="constrained")
        grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, distance in zip(grid, shown, strict=True):
            for index, evaluation in enumerate(evaluations):
                cells = [m for m in evaluation.of("phonebook", "accuracy") if m.cell.get("distance", 0) == distance]
                _accuracy_line(axes, index, len(evaluations), "pairs", cells)
            ticks = {m.cell["pairs"] for e in evaluations for m in e.of("phonebook", "accuracy") if "pairs" in m.cell}
            _accuracy_axes(axes, ticks, "pairs in the book")
            if len(distances) > 1 or distance:
                axes.set_title(f"{distance:,.0f} tokens between" if distance else "no text between", loc="left")
        grid[0].set_ylabel("share recalled")
        _legend(figure, _measured(evaluations, "phonebook", "accuracy"))
        return _svg(figure, name, "Recall by number of pairs: share of queries answered, a line per result file")


def passkey_heat_maps(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return one map per file: accuracy (in numbers and as a shade) by length and depth of the needle."""
    lengths = sorted({m.cell["length"] for e in evaluations for m in e.of("passkey", "accuracy")})
    depths = sorted({m.cell["depth"] for e in evaluations for m in e.of("passkey", "accuracy")})
    columns = min(len(evaluations), 2 if len(lengths) > 3 else 3)
    rows = -(-len(evaluations) // columns)
    with mpl.rc_context({**_SETTINGS, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(_WIDTH, rows * (0.95 + 0.34 * len(depths))), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for place, axes in enumerate(grid.flat):
            if place >= len(evaluations):
                axes.set_visible(False)
                continue
            _heat_map(axes, evaluations[place], lengths, depths)
            if place % columns == 0:
                axes.set_ylabel("depth of the needle")
            if place + columns >= len(evaluations):
                axes.set_xlabel("length in tokens")
                axes.tick_params(labelbottom=True)
        return _svg(figure, name, "Passkey: share of keys recalled by length of the text and depth of the needle")


def passkey_by_length(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return accuracy by length, the mean over depths, a line per file."""
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        lengths = {m.cell["length"] for e in evaluations for m in e.of("passkey", "accuracy")}
        for index, evaluation in enumerate(evaluations):
            points = [
                Measurement("passkey", {"length": length}, "accuracy", number.value, number.low, number.high, 0)
                for length, number in mean_by_length(evaluation).items()
            ]
            _accuracy_line(axes, index, len(evaluations), "length", points)
        _accuracy_axes(axes, lengths, "length in tokens")
        axes.set_ylabel("share recalled")
        _legend(figure, _measured(evaluations, "passkey", "accuracy"))
        return _svg(figure, name, "Passkey: share of keys recalled by length, mean over depths, a line per result file")


def mean_by_length(evaluation: Evaluation) -> dict[float, Number]:
    """Return passkey accuracy per length, averaged over depths, with its interval."""
    cells = evaluation.of("passkey", "accuracy")
    lengths = sorted({m.cell["length"] for m in cells})
    return {length: mean(m for m in cells if m.cell["length"] == length) for length in lengths}


def position_plot(evaluations: Sequence[Evaluation], name: str) -> str:
    """Return bits per byte by position in the text, a line per file; lower is better."""
    ranges = position_ranges(evaluations)
    place = {span: index for index, span in enumerate(ranges)}
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        for index, evaluation in enumerate(evaluations):
            cells = evaluation.of("bits_per_byte", "bits_per_byte")
            shift = 0.035 * (index - (len(evaluations) - 1) / 2)
            points = [(place[_span(m)] + shift, m) for m in cells]
            _line_with_bars(axes, index, sorted(points, key=lambda point: point[0]))
        axes.set_xticks(range(len(ranges)), [f"{_short(start)}–{_short(end)}" for start, end in ranges])
        if len(ranges) > 7:
            axes.tick_params(axis="x", rotation=35)
        axes.set_xlabel("position in the text, in tokens")
        axes.set_ylabel("bits per byte (lower is better)")
        axes.grid(axis="y")
        _legend(figure, _measured(evaluations, "bits_per_byte", "bits_per_byte"))
        return _svg(figure, name, "Bits per byte by position in the text, a line per result file; lower is better")


def position_ranges(evaluations: Iterable[Evaluation]) -> list[tuple[float, float]]:
    """Return every [start, end) range of positions that some file measured, in order."""
    return sorted({_span(m) for e in evaluations for m in e.of("bits_per_byte", "bits_per_byte")})


def training_plot(trainings: Sequence[Training], labels: Sequence[str], name: str) -> str:
    """Return loss by tokens seen (or steps, where tokens were not logged): every logged value and its running mean.

    `labels` are those of the page's evaluations: a run of the same label looks like them in every plot.
    """
    order = list(dict.fromkeys([*labels, *(training.label for training in trainings)]))
    unit = "tokens" if all("tokens" in row for training in trainings for row in training.log) else "step"
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, 3.5), layout="constrained")
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
        _legend(figure, [(order.index(training.label), training.label) for training in trainings])
        return _svg(figure, name, "Training loss by tokens seen, a line per run")


def running_mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the mean over a centred window of a twentieth of the curve, shorter at both ends."""
    half = len(values) // 40
    total = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return np.asarray((total[last] - total[first]) / (last - first))


def _accuracy_line(axes: Axes, index: int, lines: int, key: str, cells: Sequence[Measurement]) -> None:
    # Lines a little apart, so that one error bar does not hide another.
    shift = 2.0 ** (0.035 * (index - (lines - 1) / 2))
    points = sorted(((m.cell[key] * shift, m) for m in cells if key in m.cell), key=lambda point: point[0])
    _line_with_bars(axes, index, points)


def _line_with_bars(axes: Axes, index: int, points: Sequence[tuple[float, Measurement]]) -> None:
    style = line_style(index)
    known = [(x, m.value, m.low, m.high) for x, m in points if m.value is not None]
    axes.plot([x for x, *_ in known], [value for _, value, *_ in known], **style)
    for x, value, low, high in known:
        if low is not None and high is not None:
            spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar([x], [value], yerr=spread, color=style["color"], capsize=2.5, linewidth=1.1, fmt="none")


def _accuracy_axes(axes: Axes, ticks: Iterable[float], label: str) -> None:
    axes.set_xscale("log", base=2)
    places = sorted(ticks)
    axes.set_xticks(places, [format_length(int(place)) for place in places])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(label)
    axes.grid(axis="y")


def _heat_map(axes: Axes, evaluation: Evaluation, lengths: Sequence[float], depths: Sequence[float]) -> None:
    values = np.full((len(depths), len(lengths)), np.nan)
    for m in evaluation.of("passkey", "accuracy"):
        if m.value is not None:
            values[depths.index(m.cell["depth"]), lengths.index(m.cell["length"])] = m.value
    axes.pcolormesh(
        np.arange(len(lengths) + 1), np.arange(len(depths) + 1), values, cmap="Blues", vmin=0, vmax=1.15, edgecolors="w"
    )
    for (row, column), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else f"{100 * value:.0f}"
        axes.text(
            column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, color="w" if value > 0.6 else _INK
        )
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [format_length(int(length)) for length in lengths])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:.0%}" for depth in depths])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set_title(evaluation.label, loc="left")


def _span(measurement: Measurement) -> tuple[float, float]:
    return measurement.cell["start"], measurement.cell["end"]


def _short(position: float) -> str:
    return format_length(int(position)) if position else "0"


def _amount(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _measured(evaluations: Sequence[Evaluation], task: str, metric: str) -> list[tuple[int, str]]:
    return [(index, entry.label) for index, entry in enumerate(evaluations) if entry.of(task, metric)]


def _legend(figure: Figure, series: Sequence[tuple[int, str]]) -> None:
    # Made by hand: matplotlib would leave out labels that begin with an underscore.
    handles = [Line2D([], [], **line_style(index)) for index, _ in series]
    labels = [label for _, label in series]
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, handlelength=3.2)


def _svg(figure: Figure, name: str, title: str) -> str:
    """Return the figure as an <svg> element to stand in HTML: named, free of addresses, its ids unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # In HTML an inline <svg> needs no namespaces; without them nothing in the page looks like an address.
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = text.replace("url(#", f"url(#{name}-")
    text = text.replace("'DejaVu Sans'", _PAGE_FONT.replace("'", "&#39;"))
    opening = f'<svg role="img" aria-labelledby="{name}-title"'
    return text.replace("<svg", opening, 1).replace(">", f'><title id="{name}-title">{escape(title)}</title>', 1)
