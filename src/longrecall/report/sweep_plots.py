"""Plots of sweeps: maps of accuracy over the width of the model and the cells of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from longrecall.report.drawing import heat_map_grid
from longrecall.units import format_length


def mqar_maps(
    maps: Mapping[str, NDArray[np.float64]], widths: Sequence[int], cells: Sequence[tuple[int, int]], name: str
) -> str:
    """Return one map per model: accuracy by width (rows) and by (length, pairs) of the task (columns).

    `maps`: name of the model -> shares [widths, cells], NaN where there is none.
    """

    def name_cells(axes: Axes, _: str) -> None:
        axes.set_xticks(axes.get_xticks(), [f"{format_length(length)}\n{pairs}" for length, pairs in cells])

    labels = ("length in tokens, pairs under it", "width")
    title = "MQAR: share of values recalled by width of the model and length of the row"
    lengths, rows = [length for length, _ in cells], [str(width) for width in widths]
    # A third line under the axis needs more room than the other maps.
    return heat_map_grid(maps, lengths, rows, labels, name, title, across=3, room=1.25, finish=name_cells)
