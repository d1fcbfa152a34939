"""Charts that a task declares for reports: which numbers of its cells are drawn along which others, and in what words.

A report draws each of these kinds for any task (`longrecall.report.task_charts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainedTo:
    """Where a report finds how far training went, to mark it in a plot.

    `option`: the field of the task that says it; else the last entry of the list `source_key` of the recipe's source.
    `reading`: how to read the plot where there is a mark.
    """

    option: str
    source_key: str
    reading: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What every chart says of itself.

    `title` describes it to people who cannot see it, `caption` and `reading` (how to read it) stand below. `name`: what
    its drawing is called on the page; "" = as the task.
    """

    title: str
    caption: str
    reading: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """Shares along a number of the cells, a panel for each metric, a line for each file.

    `along`: key of the cells; `axis` and `share` name the axes. `metrics`: metric -> title of its panel.
    """

    along: str
    axis: str
    share: str
    metrics: Mapping[str, str]
    trained: TrainedTo | None = None


@dataclass(frozen=True, kw_only=True)
class PanelChart(Chart):
    """Shares along a number of the cells, a panel for each value of another one, a line for each file.

    `panels`: key of the other number, 0 where a cell leaves it out. `panel_title`: its value -> the title of its panel;
    a single panel of value 0 has none.
    """

    along: str
    axis: str
    share: str
    panels: str
    panel_title: Callable[[float], str]
    metric: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class MeanChart(Chart):
    """Shares along a number of the cells, each the mean over all cells with it, a line for each file.

    `table`: title of the table with the means.
    """

    along: str
    axis: str
    share: str
    table: str
    metric: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class ShareMap(Chart):
    """Shares by two keys of the cells, in numbers and as shades, a map for each file.

    `along`: a number, from left to right; `rows`: numbers or words, from the bottom up; `axes` names both. `row_text`:
    how a value of `rows` is written. `trained`: whether a line marks the length that a checkpoint was trained on.
    `keys`: how the table beside the map is ordered.
    """

    along: str
    rows: str
    axes: tuple[str, str]
    keys: tuple[str, str]
    row_text: Callable[[Any], str] = str
    trained: bool = False
    metric: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class RangeChart(Chart):
    """A quantity by ranges [start, end) of token positions, side by side, a line for each file.

    `ends`: the keys of the cells that say the range; `axis` and `quantity` name the axes.
    """

    axis: str
    quantity: str
    metric: str
    ends: tuple[str, str] = ("start", "end")


@dataclass(frozen=True)
class TaskSection:
    """The section of a task in a report: what stands below its heading and the paragraph on what the task asks.

    `tables`: metric -> keys by which its table is ordered, of tables below the charts. `anchor`: the section's address
    on the page; "" = the name of the task.
    """

    heading: str
    charts: tuple[Chart, ...]
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    anchor: str = ""
