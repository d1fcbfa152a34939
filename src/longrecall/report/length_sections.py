"""The section of the tasks that have a length and no section of their own, such as the needles."""

from __future__ import annotations

from collections.abc import Sequence

from longrecall.report import length_plots, task_charts
from longrecall.report.blocks import Block, Plot, Section, Table, with_interval
from longrecall.report.inputs import Evaluation, Inputs, Measurement
from longrecall.report.summaries import Number
from longrecall.report.tables import cell_keys, cell_table, explained, plotted
from longrecall.tasks.charts import ShareMap


def drawn(evaluations: Sequence[Evaluation]) -> set[tuple[str, str]]:
    """Return the (task, metric) that `other_lengths` draws: shares of tasks with a length and no section of their own.

    Of each task that is its first metric; the others stand in tables.
    """
    first: dict[str, str] = {}
    for entry in evaluations:
        for m in entry.measurements:
            first.setdefault(m.task, m.metric)
    chosen = {pair for pair in first.items() if not any(task == pair[0] for task, _ in plotted())}
    return {pair for pair in chosen if all(_is_share(m) for entry in evaluations for m in entry.of(*pair))}


def _is_share(m: Measurement) -> bool:
    length = m.cell.get("length")
    return length is not None and _is_number(length) and length > 0 and (m.value is None or 0 <= m.value <= 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def other_lengths(inputs: Inputs) -> Section | None:
    """Needles and whatever else has a length: by length, and by depth where cells say it."""
    evaluations = inputs.evaluations
    known = drawn(evaluations)
    tasks = list(
        dict.fromkeys((m.task, m.metric) for e in evaluations for m in e.measurements if (m.task, m.metric) in known)
    )
    if not tasks:
        return None
    rows = tuple((task, *row) for task, metric in tasks for row in _means(evaluations, task, metric))
    blocks: list[Block] = [note for task, _ in tasks for note in explained(task)]
    blocks.append(
        Plot(
            length_plots.task_lines(evaluations, tasks, "lengths"),
            "Share right by length of the text, mean over whatever else a task varies. Bars are 95% intervals.",
            "How to read it: where a line falls, the text has grown too long for its needles to be found again.",
            Table("Share right by length", ("task", "length", *(e.label for e in evaluations)), rows, hidden=True),
        )
    )
    for task, metric in tasks:
        cells = [m.cell for entry in evaluations for m in entry.of(task, metric)]
        keys = cell_keys(evaluations, task, metric)
        if all(_is_number(cell.get("depth")) for cell in cells):
            chart = _depth_map(task, metric, f"map-{len(blocks)}")
            blocks.append(
                Plot(
                    task_charts.share_map(evaluations, task, chart),
                    chart.caption,
                    chart.reading,
                    cell_table(evaluations, task, metric, chart.keys, hidden=True),
                )
            )
        else:
            blocks.append(cell_table(evaluations, task, metric, keys, hidden=True))
    return Section("lengths", "Needles and other tasks by length", blocks)


def _depth_map(task: str, metric: str, name: str) -> ShareMap:
    return ShareMap(
        title=f"{task}: share right by length of the text and depth of the needle",
        caption=f"{task} by depth, in percent: 0% is the beginning of the text, the farthest from the question.",
        reading="How to read it: the stronger the colour, the more is right; a map that fades to its top right forgets "
        "early text.",
        name=name,
        along="length",
        rows="depth",
        axes=("length in tokens", "depth of the needle"),
        keys=("length", "depth"),
        row_text="{:.0%}".format,
        metric=metric,
    )


def _means(evaluations: Sequence[Evaluation], task: str, metric: str) -> list[tuple[str, ...]]:
    means = [{m.cell["length"]: m for m in length_plots.by_length(entry, task, metric)} for entry in evaluations]
    rows = []
    for length in sorted({length for found in means for length in found}):
        numbers = [
            Number(m.value, m.low, m.high) if (m := found.get(length)) is not None else Number(None) for found in means
        ]
        rows.append((f"{length:,}", *map(with_interval, numbers)))
    return rows
