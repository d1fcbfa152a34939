"""Plots of sweeps: maps of accuracy over the width of the model and the cells of the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from longrecall.report.drawing import SETTINGS, WIDTH, heat_map, to_svg
from longrecall.units import format_length

_COLUMNS = 3


@dataclass(frozen=True)
class Map:
    """One model's shares: `values` float64 [widths, cells], NaN where there is none."""

    title: str
    values: NDArray[np.float64]


def mqar_maps(maps: Sequence[Map], widths: Sequence[int], cells: Sequence[tuple[int, int]], name: str) -> str:
    """Return one map per model: accuracy by width (rows) and by (length, pairs) of the task (columns)."""
    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    with mpl.rc_context({**SETTINGS, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(WIDTH, 0.5 + rows * (0.75 + 0.34 * len(widths))), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for place, axes in enumerate(grid.flat):
            if place >= len(maps):
                axes.set_visible(False)
                continue
            shown = maps[place]
            heat_map(axes, shown.values, [length for length, _ in cells], [str(width) for width in widths], shown.title)
            axes.set_xticks(axes.get_xticks(), [f"{format_length(length)}\n{pairs}" for length, pairs in cells])
            if place % columns == 0:
                axes.set_ylabel("width")
            if place + columns >= len(maps):
                axes.set_xlabel("length in tokens, pairs under it")
                axes.tick_params(labelbottom=True)
        return to_svg(figure, name, "MQAR: share of values recalled by width of the model and length of the row")
