"""The few numbers that answer "did it help?", with intervals, and their differences between two result files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.evaluation.comparison import asked_alike
from longrecall.evaluation.differences import common_cells, difference_of
from longrecall.evaluation.statistics import independent_difference, mean_interval
from longrecall.report.inputs import Evaluation, Measurement
from longrecall.tasks.declaration import Headline as TaskHeadline
from longrecall.tasks.registry import report_parts

Wanted = Callable[[Mapping[str, Any]], bool]
"""Whether a cell is among those that a number is made of."""
MOST_BESIDE = 4
"""Files that are compared side by side, a column each; of more than that each gets a row, and words on all of them."""
CONTROL_WORDS = ("control", "continued")
"""A label with one of these words in it marks plain continued training."""


@dataclass(frozen=True)
class Number:
    """A value with its 95% interval; None where it was not measured or the model diverged."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Headline:
    """One quantity: its name, whether more is better, how to write it, and its number in an evaluation."""

    name: str
    more_is_better: bool
    digits: int
    number: Callable[[Evaluation], Number]
    paired: Callable[[Evaluation, Evaluation], Number | None]

    def change(self, first: Evaluation, second: Evaluation) -> Number:
        """Return second - first: question by question where both were asked the same, else as independent samples."""
        return self.paired(first, second) or difference(self.number(second), self.number(first))

    def best_first(self, evaluations: Sequence[Evaluation]) -> list[tuple[Evaluation, Number]]:
        """Return the files that have a value, the best one first; equal ones in their order."""
        known = [(entry, number) for entry in evaluations if (number := self.number(entry)).value is not None]
        return sorted(known, key=lambda one: one[1].value or 0.0, reverse=self.more_is_better)


def mean(measurements: Iterable[Measurement]) -> Number:
    """Return the unweighted mean of independent cells; their half-widths add in squares."""
    cells = list(measurements)
    known = [(cell.value, cell.low, cell.high) for cell in cells if cell.value is not None]
    if not cells or len(known) < len(cells):
        return Number(None)
    value = sum(value for value, *_ in known) / len(known)
    interval = mean_interval(known)
    return Number(value) if interval is None else Number(value, *interval)


def difference(after: Number, before: Number) -> Number:
    """Return after - before with its interval, as if the two were independent.

    Where both files asked the same questions the true interval is narrower (`paired_change`).
    """
    if after.value is None or before.value is None:
        return Number(None)
    interval = independent_difference((before.value, before.low, before.high), (after.value, after.low, after.high))
    value = after.value - before.value
    return Number(value) if interval is None else Number(value, *interval)


def paired_change(first: Evaluation, second: Evaluation, task: str, metric: str, places: Wanted) -> Number | None:
    """Return second - first over the cells that `places` takes, question by question.

    None where the two did not measure the same of these cells, or were not asked the same questions in them.
    """
    pairs = [pair for pair in common_cells(first.data, second.data, task, metric) if places(pair[0]["cell"])]
    if any(len(pairs) != sum(places(m.cell) for m in entry.of(task, metric)) for entry in (first, second)):
        return None
    found = difference_of(pairs, task, alike=asked_alike(first.data, second.data, task))
    return Number(found.value, found.low, found.high) if found is not None and found.paired else None


def headlines(evaluations: Sequence[Evaluation]) -> list[Headline]:
    """Return the quantities that at least one file measured: all cells together, then the hardest ones."""
    found: list[Headline] = []
    for task, part in (report_parts(shares=True) | report_parts(shares=False)).items():
        cells = [m.cell for evaluation in evaluations for m in evaluation.of(task, part.metrics[0])]
        if cells and part.headlines is not None:
            found += [_headline(task, declared) for declared in part.headlines(cells)]
    return found


def control_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the file labelled as plain continued training, None when there is none."""
    return next((e for e in evaluations if any(word in e.label.lower() for word in CONTROL_WORDS)), None)


def before_and_after(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """Return the files to compare: "before" and "after" by label, else the first and the last that is no control."""
    control = control_of(evaluations)
    candidates = [entry for entry in evaluations if entry is not control]
    if len(candidates) < 2:
        return None
    by_label = {entry.label.lower(): entry for entry in candidates}
    before, after = by_label.get("before", candidates[0]), by_label.get("after", candidates[-1])
    return (before, after) if before is not after else (candidates[0], candidates[-1])


def recorded(evaluation: Evaluation, name: str) -> Number:
    """Return a number of the file's summary with its interval, where the file has them."""
    value = evaluation.data["summary"].get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return Number(None)
    intervals = evaluation.data.get("summary_intervals")
    ends = intervals.get(name) if isinstance(intervals, dict) else None
    if isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, int | float) for end in ends):
        return Number(float(value), float(ends[0]), float(ends[1]))
    return Number(float(value))


def _headline(task: str, declared: TaskHeadline) -> Headline:
    """Return the quantity that a task declares: a number of the file's summary, or a mean over cells."""

    def place(cell: Mapping[str, Any]) -> bool:
        return all(cell.get(key) == wanted for key, wanted in declared.part.items())

    def number(evaluation: Evaluation) -> Number:
        if declared.summary:
            return recorded(evaluation, declared.summary)
        return mean(m for m in evaluation.of(task, declared.metric) if place(m.cell))

    def paired(first: Evaluation, second: Evaluation) -> Number | None:
        return None if declared.summary else paired_change(first, second, task, declared.metric, place)

    return Headline(declared.name, declared.more_is_better, declared.digits, number, paired)
