"""Plots of diagnoses: perplexity, state, effective remembrance and recall, a line per file, trained lengths marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from longrecall.report.diagnoses import Diagnosis, LayerState, Point
from longrecall.report.drawing import SETTINGS, SHARE_LIMITS, WIDTH, accuracy_axes, add_legend, line_style, mark, to_svg
from longrecall.units import format_length

MOST_LAYERS = 12
"""Layers that get a panel of their own, spread evenly; the others stand in the table only."""

Styles = Sequence[str]
"""Labels of the page; the place of a file's label says how its line looks."""


def perplexity_plot(diagnoses: Sequence[Diagnosis], styles: Styles, name: str) -> str:
    """Return loss by position in the text."""
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure()
        for entry in diagnoses:
            _band(axes, entry, styles, [span.loss for span in entry.losses])
        ends = sorted({span.end for entry in diagnoses for span in entry.losses})
        _positions(axes, ends)
        _mark_trained(axes, diagnoses)
        axes.set_ylabel("loss in nats per token")
        axes.grid(axis="y")
        _legend(figure, diagnoses, styles)
        return to_svg(figure, name, "Loss by position in the text, a line per diagnosis; lower is better")


def shown_layers(diagnoses: Sequence[Diagnosis]) -> list[int]:
    """Return the layers that get a panel: all, or `MOST_LAYERS` of them, the first and the last included."""
    layers = sorted({state.layer for entry in diagnoses for state in entry.layers})
    if len(layers) <= MOST_LAYERS:
        return layers
    return [layers[round(index * (len(layers) - 1) / (MOST_LAYERS - 1))] for index in range(MOST_LAYERS)]


def state_plot(diagnoses: Sequence[Diagnosis], styles: Styles, statistic: str, words: str, name: str) -> str:
    """Return a statistic of the state by position, a panel per layer: the median over heads, shaded from least to most.

    The effective rank is shown as a share of the largest rank that a head can have.
    """
    layers = shown_layers(diagnoses)
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    share = statistic == "effective_rank"
    with mpl.rc_context({**SETTINGS, "font.size": 9.0}):
        figure = Figure(figsize=(WIDTH, 0.9 + 1.6 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=share)
        for place, axes in enumerate(grid.flat):
            if place >= len(layers):
                axes.set_visible(False)
                continue
            mixers, positive = [], False
            for entry in diagnoses:
                for state in entry.layers:
                    if state.layer == layers[place]:
                        _heads(axes, entry, styles, state, statistic)
                        mixers.append(state.mixer)
                        positive |= any(
                            v > 0 for p in range(len(entry.positions)) for v in head_values(state, statistic, p)
                        )
            kinds = ", ".join(dict.fromkeys(mixers))
            axes.set_title(f"layer {layers[place]} {kinds}".strip(), loc="left", fontsize=9)
            _positions(axes, sorted({p for entry in diagnoses for p in entry.positions}), most=4, label="")
            _mark_trained(axes, diagnoses, words=False)
            axes.grid(axis="y")
            if share:
                axes.set_ylim(*SHARE_LIMITS)
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            elif positive:
                _logarithmic(axes)
            if place + columns >= len(layers):
                axes.tick_params(labelbottom=True)
        figure.supxlabel("position in the text, in tokens", fontsize=9)
        figure.supylabel(words, fontsize=9)
        _legend(figure, diagnoses, styles)
        return to_svg(figure, name, f"{words} by position in the text, a panel per layer, a line per diagnosis")


def _logarithmic(axes: Axes) -> None:
    """Scale the vertical axis by factors: one large head must not hide the others. Zeros and blanks fall off it."""
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    # Over many decades the powers of ten are ticks enough.
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0), numticks=7))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def head_values(state: LayerState, statistic: str, place: int) -> list[float]:
    """Return the known values of all heads at one position; the effective rank as a share of the layer's ceiling."""
    scale = state.ceiling if statistic == "effective_rank" else 1
    known = (curve[place] for curve in state.heads[statistic])
    return [value / scale for value in known if value is not None]


def remembrance_plot(diagnoses: Sequence[Diagnosis], styles: Styles, name: str) -> str:
    """Return EffRem_T(t) by t, with its band."""
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure()
        for entry in diagnoses:
            _band(axes, entry, styles, entry.remembrance)
        axes.set_ylim(*SHARE_LIMITS)
        longest = max(entry.remembrance_length for entry in diagnoses)
        axes.set_xlim(-0.02 * longest, 1.02 * longest)
        for kept in dict.fromkeys((entry.remembrance_length, entry.training_length) for entry in diagnoses):
            if kept[1] < kept[0]:
                mark(axes, kept[0] - kept[1], f"last {format_length(kept[1])} kept", left=True)
        axes.set_xlabel("tokens left out at the beginning of the text (t)")
        axes.set_ylabel("EffRem: total variation")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="y")
        _legend(figure, diagnoses, styles)
        return to_svg(figure, name, "Effective remembrance by number of tokens left out, a line per diagnosis")


def recall_plot(diagnoses: Sequence[Diagnosis], styles: Styles, name: str) -> str:
    """Return the share of pass keys recalled by length."""
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure()
        for entry in diagnoses:
            _band(axes, entry, styles, entry.recall)
        accuracy_axes(axes, {point.place for entry in diagnoses for point in entry.recall}, "length in tokens")
        _thin_ticks(axes, sorted({point.place for entry in diagnoses for point in entry.recall}), 9)
        _mark_trained(axes, diagnoses)
        axes.set_ylabel("share of pass keys recalled")
        _legend(figure, diagnoses, styles)
        return to_svg(figure, name, "Share of pass keys recalled by length of the text, a line per diagnosis")


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
    return figure, figure.subplots()


def _style(label: str, styles: Styles, points: int) -> dict[str, Any]:
    return line_style(list(styles).index(label)) | {"markevery": max(1, points // 12)}


def _band(axes: Axes, entry: Diagnosis, styles: Styles, points: Sequence[Point]) -> None:
    """Draw a line with its interval as a band; where a value is unknown, both are broken."""
    style = _style(entry.label, styles, len(points))
    x = [point.place for point in points]
    value, low, high = (
        [math.nan if number is None else number for number in column]
        for column in zip(*((point.value, point.low, point.high) for point in points), strict=True)
    )
    axes.plot(x, value, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _heads(axes: Axes, entry: Diagnosis, styles: Styles, state: LayerState, statistic: str) -> None:
    values = [head_values(state, statistic, place) for place in range(len(entry.positions))]
    style = _style(entry.label, styles, 2 * len(values)) | {"markersize": 4.0, "linewidth": 1.4}
    middle, least, most = (
        [function(heads) if heads else math.nan for heads in values] for function in (median, min, max)
    )
    axes.plot(entry.positions, middle, **style)
    axes.fill_between(entry.positions, least, most, color=style["color"], alpha=0.15, linewidth=0)


def _positions(
    axes: Axes, places: Sequence[float], most: int = 9, label: str = "position in the text, in tokens"
) -> None:
    axes.set_xscale("log", base=2)
    _thin_ticks(axes, places, most)
    axes.set_xlabel(label)


def _thin_ticks(axes: Axes, places: Sequence[float], most: int) -> None:
    """Tick powers of two alone, at most `most` of them, between the first and the last place."""
    low, high = (math.floor(math.log2(max(1, places[0]))), math.ceil(math.log2(max(1, places[-1]))))
    step = max(1, -(-(high - low) // (most - 1)))
    ticks = [2.0**power for power in np.arange(high, low - 1, -step)[::-1]]
    axes.set_xticks(ticks, [format_length(int(tick)) for tick in ticks])
    axes.minorticks_off()


def _mark_trained(axes: Axes, diagnoses: Sequence[Diagnosis], words: bool = True) -> None:
    for length in sorted({entry.training_length for entry in diagnoses}):
        mark(axes, length, f"trained on {format_length(length)}" if words else "")


def _legend(figure: Figure, diagnoses: Sequence[Diagnosis], styles: Styles) -> None:
    add_legend(figure, [(list(styles).index(entry.label), entry.label) for entry in diagnoses])
