"""Sections over all tasks at once: slopes from one file to another, and recall against the size of the state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from longrecall.report import overview_plots
from longrecall.report.blocks import Plot, Section, Table, with_interval
from longrecall.report.inputs import Evaluation, Inputs
from longrecall.report.summaries import Number, before_and_after, control_of, mean, recorded
from longrecall.tasks.registry import declaration_of, task_names

MOST_SLOPES = 20
"""Lines that a panel holds; the rest, which changed least, stand in the table only."""
_REACH = re.compile(r"(?P<task>.+)\.recall_length\.threshold=(?P<threshold>[0-9.]+)")
_MOST_THRESHOLDS = 2
_LEAST_SIZES, _LEAST_POINTS = 3, 4
"""State sizes and files from which recall by size is drawn."""


def slopes(inputs: Inputs) -> Section | None:
    """Every task's share before and after, and before and with plain continued training."""
    pair = before_and_after(inputs.evaluations)
    if pair is None:
        return None
    before, after = pair
    control = control_of(inputs.evaluations)
    panels = [(before.label, other.label, _shares(before, other)) for other in (after, control) if other is not None]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    rows = [
        (key, f"{left} to {right}", with_interval(first), with_interval(second))
        for left, right, lines in panels
        for key, (first, second) in lines.items()
    ]
    drawn = [(left, right, _steepest(lines)) for left, right, lines in panels]
    caption = (
        "Share right in each task, mean over the cells that both files measured, from one file to the other. Bars are "
        "95% intervals."
    )
    if any(len(lines) > MOST_SLOPES for *_, lines in panels):
        caption += f" The {MOST_SLOPES} tasks that changed most are drawn; the table has all."
    plot = Plot(
        overview_plots.slope_chart(drawn, "slopes"),
        caption,
        "How to read it: a line that climbs is a task that became better. Where there is a second panel, compare its "
        "slope with that of plain training.",
        Table("Share right in each task", ("task", "files", "first", "second"), tuple(rows), hidden=True),
    )
    return Section("slopes", "Task by task", [plot])


def _shares(first: Evaluation, second: Evaluation) -> dict[str, tuple[Number, Number]]:
    """Return task -> means of its first metric over common cells, where these are known shares."""
    found: dict[str, tuple[Number, Number]] = {}
    for task, metric in _first_metrics([first, second]).items():
        ours, theirs = ({_key(m.cell): m for m in entry.of(task, metric)} for entry in (first, second))
        common = [key for key in ours if key in theirs]
        pair = mean(ours[key] for key in common), mean(theirs[key] for key in common)
        values = [m.value for cells in (ours, theirs) for m in cells.values() if m.value is not None]
        if _of_shares(task) and None not in (pair[0].value, pair[1].value) and max(values) <= 1 and min(values) >= 0:
            found[task] = pair
    return found


def _of_shares(task: str) -> bool:
    part = declaration_of(task).report
    return part is None or part.shares


def _steepest(lines: Mapping[str, tuple[Number, Number]]) -> dict[str, tuple[Number, Number]]:
    def change(key: str) -> float:
        first, second = lines[key]
        return abs((second.value or 0.0) - (first.value or 0.0))

    kept = sorted(lines, key=change, reverse=True)[:MOST_SLOPES]
    return {key: numbers for key, numbers in lines.items() if key in kept}


def state_size(inputs: Inputs) -> Section | None:
    """How much and how far is recalled, by the size of the state, when several files say it."""
    entries = [e for e in inputs.evaluations if isinstance(e.data["checkpoint"].get("state_size"), int)]
    entries = [e for e in entries if e.data["checkpoint"]["state_size"] > 0]
    sizes = {entry.data["checkpoint"]["state_size"] for entry in entries}
    quantities = {words: numbers for words, numbers in _reach(entries).items() if len(numbers) > 1}
    if len(sizes) < 2 or not quantities:
        return None
    rows = [
        (
            entry.label,
            f"{entry.data['checkpoint']['state_size']:,}",
            *(with_interval(numbers.get(entry.label, Number(None)), 0) for numbers in quantities.values()),
        )
        for entry in sorted(entries, key=lambda entry: int(entry.data["checkpoint"]["state_size"]))
    ]
    table = Table(
        "Recall by size of the state",
        ("checkpoint", "numbers in the state", *(" ".join(words.split()) for words in quantities)),
        tuple(rows),
    )
    if len(sizes) < _LEAST_SIZES or len(entries) < _LEAST_POINTS:
        if set(quantities) <= set(_capacity_words().values()):
            return None  # these numbers stand among the first ones of the page already
        # Two or three dots are no curve; the numbers themselves say more.
        return Section("state-size", "Recall against the size of the state", [table])
    plot = Plot(
        overview_plots.state_plot(entries, quantities, "state-size"),
        "What a checkpoint recalls, by the size of its recurrent state (how many numbers it holds). Both axes are "
        "logarithmic; 0 is drawn below the lowest mark. Bars are 95% intervals.",
        "How to read it: if the points climb to the right, the larger state is used. Points above each other have "
        "the same size of state and differ only in training.",
        replace(table, hidden=True),
    )
    return Section("state-size", "Recall against the size of the state", [plot])


def _reach(entries: Sequence[Evaluation]) -> dict[str, dict[str, Number]]:
    """Return words -> label -> number: capacities, and recall lengths at two thresholds a task."""
    found: dict[str, dict[str, Number]] = {}
    for name, words in _capacity_words().items():
        capacity = {e.label: recorded(e, name) for e in entries if name in e.data["summary"]}
        found |= {words: capacity} if capacity else {}
    thresholds: dict[str, set[str]] = {}
    for entry in entries:
        for key in entry.data["summary"]:
            match = _REACH.fullmatch(key)
            if match:
                thresholds.setdefault(match["task"], set()).add(match["threshold"])
    for task, levels in thresholds.items():
        ordered = sorted(levels, key=float)
        for level in list(dict.fromkeys([ordered[0], ordered[-1]]))[:_MOST_THRESHOLDS]:
            key = f"{task}.recall_length.threshold={level}"
            numbers = {e.label: recorded(e, key) for e in entries if key in e.data["summary"]}
            found[f"{task}:\ntokens, above {float(level):.0%}"] = numbers
    return found


def _capacity_words() -> dict[str, str]:
    """Return name in the summaries -> words, of the capacities that tasks declare with some."""
    declared = {name: declaration_of(name).capacity for name in task_names()}
    return {f"{name}.capacity": found.words for name, found in declared.items() if found is not None and found.words}


def _first_metrics(evaluations: Sequence[Evaluation]) -> dict[str, str]:
    metrics: dict[str, str] = {}
    for evaluation in evaluations:
        for m in evaluation.measurements:
            metrics.setdefault(m.task, m.metric)
    return metrics


def _key(cell: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in cell.items()))
