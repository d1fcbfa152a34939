"""The sections that tasks declare: their charts, with the numbers in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from longrecall.report import task_charts
from longrecall.report.blocks import Block, Plot, Section, Table, with_interval
from longrecall.report.inputs import Evaluation, Inputs
from longrecall.report.summaries import Number
from longrecall.report.tables import cell_table, explained, measured_by
from longrecall.tasks.charts import Chart, LineChart, MeanChart, PanelChart, RangeChart, ShareMap, TaskSection
from longrecall.tasks.registry import report_parts


def makers(shares: bool) -> list[Callable[[Inputs], Section | None]]:
    """Return what makes the sections of the tasks that measure shares of right answers, or of the others."""
    parts = report_parts(shares).items()
    return [partial(task_section, task=task, declared=part.section) for task, part in parts if part.section is not None]


def task_section(inputs: Inputs, task: str, declared: TaskSection) -> Section | None:
    """The section that `task` declares; None where no file measured what it draws."""
    plots = [plot for chart in declared.charts if (plot := _PLOTS[type(chart)](inputs, task, chart)) is not None]
    if not plots:
        return None
    blocks: list[Block] = [*explained(task), *plots]
    for metric, keys in declared.tables.items():
        if measured_by(inputs.evaluations, task, metric):
            blocks.append(cell_table(inputs.evaluations, task, metric, keys))
    return Section(declared.anchor or task, declared.heading, blocks)


def line_chart(inputs: Inputs, task: str, chart: LineChart) -> Plot | None:
    """Lines with a panel for each metric, the metrics below each other in one table."""
    metrics = [metric for metric in chart.metrics if measured_by(inputs.evaluations, task, metric)]
    if not metrics:
        return None
    tables = [cell_table(inputs.evaluations, task, metric, (chart.along,)) for metric in metrics]
    header = ("metric", *tables[0].header)
    rows = tuple(
        (chart.metrics[metric], *row) for metric, table in zip(metrics, tables, strict=True) for row in table.rows
    )
    trained = sorted({place for entry in inputs.evaluations for place in _trained_to(entry, inputs, task, chart)})
    return Plot(
        task_charts.line_chart(inputs.evaluations, task, chart, trained),
        chart.caption,
        chart.trained.reading if trained and chart.trained is not None else chart.reading,
        Table(f"{task}: accuracy", header, rows, hidden=True),
    )


def _trained_to(evaluation: Evaluation, inputs: Inputs, task: str, chart: LineChart) -> list[int]:
    """Return how far training went as the evaluation says it, else as a recipe of the same label does."""
    if chart.trained is None:
        return []
    options = _mapping(_mapping(evaluation.data.get("settings")).get("options"))
    given = _mapping(options.get(task)).get(chart.trained.option)
    if isinstance(given, int):
        return [given]
    longest = []
    for run in inputs.trainings:
        sources = _mapping(_mapping(run.data.get("recipe")).get("data")).get("sources")
        for source in sources if isinstance(sources, list) and run.label == evaluation.label else ():
            lengths = _mapping(source).get(chart.trained.source_key)
            if _mapping(source).get("kind") == task and isinstance(lengths, list) and lengths:
                longest.append(int(lengths[-1]))
    return longest


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def panel_chart(inputs: Inputs, task: str, chart: PanelChart) -> Plot | None:
    """Lines with a panel for each value of a second number."""
    if not measured_by(inputs.evaluations, task, chart.metric):
        return None
    data = cell_table(inputs.evaluations, task, chart.metric, (chart.along, chart.panels))
    return Plot(task_charts.panel_chart(inputs.evaluations, task, chart), chart.caption, chart.reading, data)


def mean_chart(inputs: Inputs, task: str, chart: MeanChart) -> Plot | None:
    """Lines of means over all else."""
    if not measured_by(inputs.evaluations, task, chart.metric):
        return None
    means = [task_charts.means_along(entry, task, chart) for entry in inputs.evaluations]
    rows = tuple(
        (f"{place:,.0f}", *(with_interval(found.get(place, Number(None))) for found in means))
        for place in sorted({place for found in means for place in found})
    )
    header = (chart.along, *(entry.label for entry in inputs.evaluations))
    data = Table(chart.table, header, rows, hidden=True)
    return Plot(task_charts.mean_chart(inputs.evaluations, task, chart), chart.caption, chart.reading, data)


def share_map(inputs: Inputs, task: str, chart: ShareMap) -> Plot | None:
    """A map of shares for each file."""
    if not measured_by(inputs.evaluations, task, chart.metric):
        return None
    data = cell_table(inputs.evaluations, task, chart.metric, chart.keys)
    return Plot(task_charts.share_map(inputs.evaluations, task, chart), chart.caption, chart.reading, data)


def range_chart(inputs: Inputs, task: str, chart: RangeChart) -> Plot | None:
    """Lines over ranges of positions."""
    if not measured_by(inputs.evaluations, task, chart.metric):
        return None
    data = cell_table(inputs.evaluations, task, chart.metric, chart.ends)
    return Plot(task_charts.range_chart(inputs.evaluations, task, chart), chart.caption, chart.reading, data)


_PLOTS: Mapping[type[Chart], Callable[[Inputs, str, Any], Plot | None]] = {
    LineChart: line_chart,
    PanelChart: panel_chart,
    MeanChart: mean_chart,
    ShareMap: share_map,
    RangeChart: range_chart,
}
