"""Plots over all tasks at once: what changed from one file to another, and recall against the size of the state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longrecall.report.drawing import INK, SETTINGS, WIDTH, add_legend, folded, line_style, to_svg
from longrecall.report.inputs import Evaluation
from longrecall.report.summaries import Number
from longrecall.units import format_length

_SIDE_LETTERS = 14
"""Letters of a line under one side of a panel of slopes."""
_MOST_TICKS = 14
_LABEL_GAP = 0.17
"""Inches from one label to the next: a line of small type."""


def slope_chart(panels: Sequence[tuple[str, str, Mapping[str, tuple[Number, Number]]]], name: str) -> str:
    """Return a panel for each (left label, right label, name -> shares on both sides): a line per name."""
    most = max(len(lines) for *_, lines in panels)
    height = max(3.2, 1.0 + 1.15 * _LABEL_GAP * most)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        order = list(dict.fromkeys(key for *_, lines in panels for key in lines))
        for axes, (left, right, lines) in zip(grid, panels, strict=True):
            _slopes(axes, order, lines, gap=_LABEL_GAP / (height - 0.8))
            axes.set_xticks([0, 1], [folded(side, _SIDE_LETTERS, lines=3) for side in (left, right)])
        grid[0].set_ylabel("share right")
        return to_svg(figure, name, "Share right in each task, a line from one result file to the other")


def _slopes(axes: Axes, order: Sequence[str], lines: Mapping[str, tuple[Number, Number]], gap: float) -> None:
    known = {key: (a.value, b.value) for key, (a, b) in lines.items() if a.value is not None and b.value is not None}
    for key, values in known.items():
        style = line_style(order.index(key))
        axes.plot([0, 1], values, **style)
        for x, number in enumerate(lines[key]):
            if number.low is not None and number.high is not None:
                axes.vlines(x, number.low, number.high, color=style["color"], linewidth=1.1)
    places = spread({key: after for key, (_, after) in known.items()}, gap)
    for key, (before, after) in known.items():
        words = f"{key}  {before:.0%} to {after:.0%}"
        arrow = {"arrowstyle": "-", "color": line_style(order.index(key))["color"], "linewidth": 0.6, "shrinkB": 4}
        axes.annotate(
            words,
            (1, after),
            xytext=(1.12, places[key]),
            va="center",
            fontsize=8.5,
            color=INK,
            arrowprops=arrow | {"shrinkA": 1, "relpos": (0.0, 0.5)},
        )
    # The labels stand inside the axes, where the layout leaves them room.
    axes.set_xlim(-0.12, 2.6)
    axes.set_ylim(-0.05, 1.05)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines["bottom"].set_bounds(0, 1)
    axes.hlines(axes.get_yticks(), 0, 1, color=SETTINGS["grid.color"], linewidth=0.6, zorder=0.5)


def spread(wanted: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return places near those `wanted` (shares) that are at least `gap` apart, in the same order.

    Labels that are too near form a pile around the mean of their places; a pile that sticks out above 1 or below 0 is
    moved back as long as there is room.
    """
    keys = sorted(wanted, key=lambda key: wanted[key])
    piles: list[tuple[float, int]] = []
    for key in keys:
        centre, count = wanted[key], 1
        while True:
            half = (count - 1) * gap / 2
            centre = max(min(centre, 1 - half), half)
            if not piles or centre - half >= piles[-1][0] + (piles[-1][1] - 1) * gap / 2 + gap - 1e-12:
                break
            below, many = piles.pop()
            centre, count = (centre * count + below * many) / (count + many), count + many
        piles.append((centre, count))
    places = [centre + (place - (count - 1) / 2) * gap for centre, count in piles for place in range(count)]
    return dict(zip(keys, places, strict=True))


def state_plot(evaluations: Sequence[Evaluation], quantities: Mapping[str, Mapping[str, Number]], name: str) -> str:
    """Return a panel per quantity (how far or how much is recalled, whole numbers): a point per file by state size.

    `quantities`: words -> label of a file -> number; every file has a state size.
    """
    with mpl.rc_context(SETTINGS):
        columns = min(3, len(quantities))
        rows = -(-len(quantities) // columns)
        figure = Figure(figsize=(WIDTH, 0.5 + 2.7 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
        sizes = sorted({int(entry.data["checkpoint"]["state_size"]) for entry in evaluations})
        for axes in grid.flat[len(quantities) :]:
            axes.set_visible(False)
        for axes, (words, numbers) in zip(grid.flat, quantities.items(), strict=False):
            _points(axes, evaluations, numbers)
            axes.set_title(words, loc="left", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
            ticks = _apart(sizes)
            axes.set_xticks(ticks, [f"{size:,}" for size in ticks], rotation=35 if len(ticks) > 3 else 0)
            axes.minorticks_off()
            axes.tick_params(labelbottom=True)
            axes.grid(axis="y")
        figure.supxlabel("numbers in the recurrent state", fontsize=10)
        shown = {
            label for numbers in quantities.values() for label, number in numbers.items() if number.value is not None
        }
        named = [(index, entry.label) for index, entry in enumerate(evaluations) if entry.label in shown]
        add_legend(figure, named, lines=False)
        return to_svg(figure, name, "Recall against the size of the recurrent state, a point per result file")


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those of rising sizes whose numbers, on a logarithmic axis, do not run into one another."""
    kept: list[int] = []
    span = math.log2(sizes[-1] / sizes[0]) + 1.2
    for size in sizes:
        if not kept or math.log2(size / kept[-1]) > span / _MOST_TICKS:
            kept.append(size)
    return kept


def _points(axes: Axes, evaluations: Sequence[Evaluation], numbers: Mapping[str, Number]) -> None:
    values = []
    for index, entry in enumerate(evaluations):
        number = numbers.get(entry.label)
        if number is None or number.value is None:
            continue
        size, style = entry.data["checkpoint"]["state_size"], line_style(index)
        # Files of one size stand side by side, so that none hides another.
        alike = [other.label for other in evaluations if other.data["checkpoint"]["state_size"] == size]
        size *= 2.0 ** (0.12 * (alike.index(entry.label) - (len(alike) - 1) / 2))
        if number.low is not None and number.high is not None:
            axes.vlines(size, number.low, number.high, color=style["color"], linewidth=1.1)
        axes.plot([size], [number.value], **style | {"linestyle": "", "markersize": 7.5})
        values += [end for end in (number.value, number.low, number.high) if end]
    # Doubling marks down to the least number, and 0 one step below it.
    least, most = min(values, default=1.0), max(values, default=1.0)
    powers = [2**power for power in range(31) if least / 2 < 2**power <= 2 * most]
    axes.set_yscale("symlog", base=2, linthresh=powers[0], linscale=1.0)
    axes.set_ylim(-powers[0] / 6, powers[-1] * 1.2)
    kept = [0, *powers[:: -(-len(powers) // 6)]]
    axes.set_yticks(kept, [format_length(place) if place else "0" for place in kept])
