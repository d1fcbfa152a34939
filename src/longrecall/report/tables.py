"""Tables of measurements: a row per cell, a column per file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from longrecall.report.blocks import Note, Table, with_interval
from longrecall.report.inputs import Evaluation, Measurement
from longrecall.report.summaries import Number
from longrecall.tasks.registry import report_parts, wording_of


def plotted() -> set[tuple[str, str]]:
    """Return the (task, metric) that have a section of their own, where their tables are folded away."""
    parts = report_parts(shares=True) | report_parts(shares=False)
    return {(task, metric) for task, part in parts.items() for metric in part.metrics}


def explained(task: str) -> list[Note]:
    """Return a paragraph on what a task asks of a model; nothing for a task that says nothing of itself."""
    words = wording_of(task)
    return [Note(f"{words.title[:1].upper()}{words.title[1:]}: {words.explanation}")] if words.explanation else []


def measured_by(evaluations: Iterable[Evaluation], task: str, metric: str) -> list[Evaluation]:
    """Return the files that measured this."""
    return [evaluation for evaluation in evaluations if evaluation.of(task, metric)]


def cell_keys(evaluations: Iterable[Evaluation], task: str, metric: str) -> tuple[str, ...]:
    """Return what the cells of a metric say, in the order of the files."""
    return tuple(dict.fromkeys(key for e in evaluations for m in e.of(task, metric) for key in m.cell))


def cell_table(
    evaluations: Sequence[Evaluation], task: str, metric: str, keys: tuple[str, ...], hidden: bool | None = None
) -> Table:
    """Return a row per cell and a column per file; `keys` first, whatever else a cell says after them.

    `hidden` None: folded away iff it is among those that are `plotted`.
    """
    columns = tuple(dict.fromkeys([*keys, *cell_keys(evaluations, task, metric)]))
    found: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for evaluation in evaluations:
        for m in evaluation.of(task, metric):
            found.setdefault(tuple(m.cell.get(key, "") for key in columns), {})[evaluation.label] = m
    rows = []
    for cell in sorted(found, key=_cell_order):
        texts = [_cell_text(part) for part in cell]
        for evaluation in evaluations:
            measured = found[cell].get(evaluation.label)
            number = Number(None) if measured is None else Number(measured.value, measured.low, measured.high)
            texts.append(with_interval(number) + (f"\nn = {measured.count:,}" if measured else ""))
        rows.append(tuple(texts))
    folded = (task, metric) in plotted() if hidden is None else hidden
    header = (*columns, *(evaluation.label for evaluation in evaluations))
    return Table(f"{task}: {metric.replace('_', ' ')}", header, tuple(rows), folded)


def _cell_order(cell: Sequence[Any]) -> tuple[tuple[bool, float, str], ...]:
    """Numbers by size, then everything else by its text."""
    return tuple((False, float(part), "") if isinstance(part, int | float) else (True, 0.0, str(part)) for part in cell)


def _cell_text(part: Any) -> str:
    if isinstance(part, int | float) and not isinstance(part, bool):
        return f"{part:,}" if isinstance(part, int) else f"{part:,g}"
    return str(part) or "–"
