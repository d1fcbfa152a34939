"""One look for all plots: told apart by colour, marker and line, so that they survive a grey printer; inline SVG."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from longrecall.report.inputs import Evaluation, Measurement
from longrecall.report.theme import PAGE, SERIES, SHADES, map_ink, themed
from longrecall.units import format_length

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES: tuple[Any, ...] = ((0, (4, 2)), "-", (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
INK, _FAINT, _PAPER = (PAGE[name][0] for name in ("ink", "line", "paper"))
_COLOURS = [light for light, _ in SERIES]
SETTINGS: Any = {
    "svg.fonttype": "none",
    # A label is a label: dollars start no formula.
    "text.parse_math": False,
    "svg.hashsalt": "longrecall",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
}
WIDTH = 7.6
_KEY_WIDTH, _LETTER_WIDTH, _LEGEND_LINE = 0.72, 0.085, 0.21
"""Inches of a line and its gaps in a legend, of a letter, and of a row of it."""
_MANY_MAPS = 6
_MAP_SIDE, _BOLD_WIDTH = 0.5, 0.098
"""Inches beside a map, and of a letter of its title."""
_MOST_COLUMNS, _LONGEST, _LONGEST_OF_MANY = 4, 38, 22
"""Of a legend: columns, and letters of a label, of one among many too."""
SHARE_LIMITS = (-0.03, 1.03)
"""The vertical axis of shares: markers at 0 and 1 stay whole."""


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and line of the series at `index`, the same in every plot of a page."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        # The ninth series has the first colour and marker again, but another line.
        "linestyle": _LINES[(index + index // len(_COLOURS)) % len(_LINES)],
        "linewidth": 1.7,
        "markersize": 5.5,
    }


def accuracy_line(axes: Axes, index: int, lines: int, key: str, cells: Sequence[Measurement]) -> None:
    """Draw accuracy by `key` of the cells: line `index` of `lines`."""
    # Lines a little apart, so that one error bar does not hide another.
    shift = 2.0 ** (0.035 * (index - (lines - 1) / 2))
    points = sorted(((m.cell[key] * shift, m) for m in cells if key in m.cell), key=lambda point: point[0])
    line_with_bars(axes, index, points)


def line_with_bars(axes: Axes, index: int, points: Sequence[tuple[float, Measurement]]) -> None:
    """Draw line `index` through (x, measurement), with the 95% intervals as bars."""
    style = line_style(index)
    known = [(x, m.value, m.low, m.high) for x, m in points if m.value is not None]
    axes.plot([x for x, *_ in known], [value for _, value, *_ in known], **style)
    for x, value, low, high in known:
        if low is not None and high is not None:
            spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar([x], [value], yerr=spread, color=style["color"], capsize=2.5, linewidth=1.1, fmt="none")


def accuracy_axes(axes: Axes, ticks: Iterable[float], label: str) -> None:
    """Scale axes for shares over places that double, and name them."""
    axes.set_xscale("log", base=2)
    places = sorted(ticks)
    axes.set_xticks(places, [format_length(int(place)) for place in places])
    axes.minorticks_off()
    axes.set_ylim(*SHARE_LIMITS)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(label)
    axes.grid(axis="y")


def measured(evaluations: Sequence[Evaluation], task: str, metric: str) -> list[tuple[int, str]]:
    """Return (index, label) of the files that measured this."""
    return [(index, entry.label) for index, entry in enumerate(evaluations) if entry.of(task, metric)]


def add_legend(figure: Figure, series: Sequence[tuple[int, str]], lines: bool = True) -> None:
    """Put a legend over the figure: `series` are (style index, label); without `lines` it shows the markers alone.

    Long labels are cut, and columns are as many as fit. The figure grows by the lines that it was not planned for.
    """
    # Made by hand: matplotlib would leave out labels that begin with an underscore.
    plain = {} if lines else {"linestyle": ""}
    handles = [Line2D([], [], **line_style(index) | plain) for index, _ in series]
    most = _LONGEST if len(series) <= _MOST_COLUMNS else _LONGEST_OF_MANY
    labels = [shortened(label, most) for _, label in series]
    column = _KEY_WIDTH + _LETTER_WIDTH * max(map(len, labels), default=0)
    columns = max(1, min(_MOST_COLUMNS, int(figure.get_figwidth() / column)))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * max(0, rows - 1))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, handlelength=3.2)


def shortened(label: str, most: int) -> str:
    """Return a label in at most so many letters: what is cut out of its middle becomes an ellipsis."""
    if len(label) <= most:
        return label
    end = (most - 1) // 2
    return f"{label[: most - 1 - end]}…{label[len(label) - end :]}"


_DECIMALS = re.compile(r' (?:d|x|y|points)="[^"]*"')
"""Attributes with places, in points: a hundredth is finer than any screen, and half of the letters."""


def folded(label: str, letters: int, lines: int = 2) -> str:
    """Return a label in at most so many lines of so many letters each; what does not fit becomes an ellipsis."""
    return "\n".join(textwrap.wrap(label, letters, max_lines=lines, placeholder="…"))


def to_svg(figure: Figure, name: str, title: str) -> str:
    """Return the figure as an <svg> element to stand in HTML: named, free of addresses, its ids unique on the page."""
    buffer = io.StringIO()
    # `savefig` would draw twice, first of all to learn how large the drawing is, which the figure says itself.
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # In HTML an inline <svg> needs no namespaces; without them nothing in the page looks like an address.
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = text.replace("url(#", f"url(#{name}-")
    # The page has its own font, and lines of text that are not turned need no turn.
    text = re.sub(r" font-family: (?:[^;&\"]|&#39;)*;", "", text)
    text = re.sub(r' transform="rotate\(-?0 [^)]*\)"|(?<=<g) id="[^"]*"(?=>)', "", text)
    text = re.sub(r"\n\s*", "\n", text)
    text = _DECIMALS.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), themed(text))
    opening = f'<svg role="img" aria-labelledby="{name}-title"'
    return text.replace("<svg", opening, 1).replace(">", f'><title id="{name}-title">{escape(title)}</title>', 1)


def describe(svg: str, text: str) -> str:
    """Return an element of `to_svg` with `text` as its description, for those who hear the page."""
    titled = re.match(r'<svg role="img" aria-labelledby="(.+?)-title"', svg)
    if titled is None:
        raise ValueError("this is no element of to_svg")
    place = f"{titled[1]}-desc"
    named = f'{titled[0]} aria-describedby="{place}"{svg[titled.end() :]}'
    return named.replace("</title>", f'</title><desc id="{place}">{escape(text)}</desc>', 1)


def heat_map(
    axes: Axes, values: NDArray[np.float64], columns: Sequence[float], rows: Sequence[str], title: str
) -> None:
    """Draw shares in [0, 1] as shades with their percentages; `values` [rows, columns], NaN for what is not known.

    `columns` are lengths in tokens.
    """
    axes.pcolormesh(
        np.arange(len(columns) + 1), np.arange(len(rows) + 1), values, cmap=SHADES, vmin=0, vmax=1, edgecolors=_PAPER
    )
    for (row, column), value in np.ndenumerate(values):
        unknown = bool(np.isnan(value))
        if unknown:
            # Hatched, so that what was not measured is no pale "0" on a grey print.
            hatched = Rectangle((column, row), 1, 1, facecolor=_PAPER, edgecolor=_FAINT, hatch="////", linewidth=0)
            axes.add_patch(hatched)
        axes.text(
            column + 0.5,
            row + 0.5,
            "–" if unknown else f"{100 * value:.0f}",
            ha="center",
            va="center",
            fontsize=9,
            color=INK if unknown else map_ink(float(value)),
        )
    axes.set_xticks(np.arange(len(columns)) + 0.5, [format_length(int(length)) for length in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    # First row on top. Not invert_yaxis(): maps that share an axis would turn it around and around.
    axes.set_ylim(len(rows), 0)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left")


def heat_map_grid(
    maps: Mapping[str, NDArray[np.float64]],
    columns: Sequence[float],
    rows: Sequence[str],
    axis_labels: tuple[str, str],
    name: str,
    title: str,
    *,
    across: int | None = None,
    room: float = 0.95,
    finish: Callable[[Axes, str], None] | None = None,
) -> str:
    """Return maps of the same places side by side, as an element of `to_svg`.

    Args:
        maps: title of a map -> shares [rows, columns], NaN for what is not known.
        columns: lengths in tokens.
        rows: names of the rows.
        axis_labels: what columns and rows are; "" for nothing.
        name: the element's id on the page.
        title: the element's title.
        across: most maps side by side; None = as many as their numbers leave room for.
        room: inches of a map beside its rows, for titles and ticks.
        finish: called with the axes and the title of each map, for what only this figure has.
    """
    narrow = len(columns) <= 3 or (len(maps) > _MANY_MAPS and len(columns) <= 5)
    panels = min(len(maps), across or (3 if narrow else 2))
    lines = -(-len(maps) // panels)
    letters = int((WIDTH / panels - _MAP_SIDE) / _BOLD_WIDTH)
    titles = {words: folded(words, letters) for words in maps}
    more = 0.17 * any("\n" in title for title in titles.values())
    with mpl.rc_context({**SETTINGS, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(WIDTH, lines * (room + more + 0.34 * len(rows))), layout="constrained")
        grid = figure.subplots(lines, panels, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(maps) :]:
            axes.set_visible(False)
        for place, (words, values) in enumerate(maps.items()):
            axes = grid.flat[place]
            heat_map(axes, values, columns, rows, titles[words])
            if finish is not None:
                finish(axes, words)
            if place % panels == 0:
                axes.set_ylabel(axis_labels[1])
            if place + panels >= len(maps):
                axes.set_xlabel(axis_labels[0])
                axes.tick_params(labelbottom=True)
        return to_svg(figure, name, title)


def mark(axes: Axes, place: float, words: str, left: bool = False) -> None:
    """Draw a dotted vertical line at `place`, with `words` to the right (or left) of its upper end.

    Shares leave room for the words: the axis goes on above 100%.
    """
    if words and axes.get_ylim()[1] == SHARE_LIMITS[1]:
        axes.set_ylim(SHARE_LIMITS[0], 1.13)
    axes.axvline(place, color=INK, linewidth=1.1, linestyle=(0, (1, 2)), zorder=0.5)
    axes.annotate(
        words,
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if left else 3, -2),
        textcoords="offset points",
        fontsize=8,
        va="top",
        ha="right" if left else "left",
        color=INK,
    )
