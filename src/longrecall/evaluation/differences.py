"""How much changed from one result file to another: differences of tasks and of cells, with intervals and tests.

Where two files were asked the same questions each question is compared with itself (`longrecall.evaluation.paired`);
else the two are independent samples. `longrecall.evaluation.verdict` says it in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from longrecall.evaluation.comparison import asked_alike, less_is_better
from longrecall.evaluation.outcomes import Outcomes, unpack
from longrecall.evaluation.paired import holm, paired_interval, paired_test
from longrecall.evaluation.statistics import independent_difference, mean_interval
from longrecall.tasks.encoding import cell_key
from longrecall.tasks.registry import wording_of

Result = Mapping[str, Any]
Entry = Mapping[str, Any]
Outcome = Literal["better", "worse", "cannot tell"]

ALPHA = 0.05
"""Chance of one or more false "better" or "worse" among the tasks of one comparison, and among its cells."""


@dataclass(frozen=True)
class Difference:
    """Two values of one quantity and the 95% interval of second - first; None where nothing can be said of it.

    `p` is two-sided, of the hypothesis that nothing changed. `paired`: each question was compared with itself.
    """

    first: float
    second: float
    low: float | None
    high: float | None
    p: float
    paired: bool

    @property
    def value(self) -> float:
        """second - first."""
        return self.second - self.first


def difference_of(pairs: Sequence[tuple[Entry, Entry]], task: str, *, alike: bool) -> Difference | None:
    """Return the difference of the mean over cells, from (first, second) entries of each cell; None if one diverged.

    `alike`: both files were asked the same questions of `task` (`asked_alike`), so outcomes are compared one by one
    where both files have them.
    """
    if not pairs or any(entry["value"] is None for pair in pairs for entry in pair):
        return None
    shared = wording_of(task).shared
    matched = [_matched(pair) for pair in pairs] if alike else [None]
    whole = [pair for pair in matched if pair is not None]
    if len(whole) == len(pairs):
        return _paired(whole, shared)
    return _independent(pairs, shared)


def entries_of(result: Result, task: str, metric: str) -> list[Entry]:
    """Return the entries of one metric of one task; numbers that are not finite are None."""
    numbers = ("value", "low", "high")
    return [
        {**entry, **{key: entry.get(key) if is_number(entry.get(key)) else None for key in numbers}}
        for entry in result["results"]
        if (entry["task"], entry["metric"]) == (task, metric)
    ]


def common_cells(first: Result, second: Result, task: str, metric: str) -> list[tuple[Entry, Entry]]:
    """Return the entries of the cells that both results measured, in the order of the first."""
    ours = entries_of(first, task, metric)
    theirs = {cell_key(task, e["cell"]): e for e in entries_of(second, task, metric)}
    return [(e, theirs[cell_key(task, e["cell"])]) for e in ours if cell_key(task, e["cell"]) in theirs]


@dataclass(frozen=True)
class TaskChange:
    """What is known of one task in both files; `cells`: (place, difference, outcome) of each cell without divergence.

    `diverged`: cells in which only the first, and only the second, gave no finite number.
    """

    name: str
    metric: str
    difference: Difference | None
    outcome: Outcome
    cells: tuple[tuple[str, Difference, Outcome], ...]
    diverged: tuple[int, int]
    count: int


def first_metrics(result: Result) -> dict[str, str]:
    """Return the first metric of each task, in the order of the file: the others judge the same answers again."""
    metrics: dict[str, str] = {}
    for entry in result["results"]:
        metrics.setdefault(entry["task"], entry["metric"])
    return metrics


def changes(first: Result, second: Result) -> list[TaskChange]:
    """Return what became of each task that both files measured, by its first metric, over the cells of both."""
    found = []
    for task, metric in first_metrics(first).items():
        pairs = common_cells(first, second, task, metric)
        if not pairs:
            continue
        alike = asked_alike(first, second, task)
        finite = [pair for pair in pairs if pair[0]["value"] is not None and pair[1]["value"] is not None]
        diverged = tuple(sum(p[i]["value"] is None is not p[1 - i]["value"] for p in pairs) for i in (0, 1))
        cells = []
        for pair in finite:
            difference = difference_of([pair], task, alike=alike)
            if difference is not None:
                cells.append((wording_of(task).place(pair[0]["cell"]), difference, _neutral()))
        whole = difference_of(finite, task, alike=alike)
        counts = (int(diverged[0]), int(diverged[1]))
        found.append(TaskChange(task, metric, whole, _neutral(), tuple(cells), counts, len(pairs)))
    return _judged(found)


def _neutral() -> Outcome:
    return "cannot tell"


def _judged(tasks: Sequence[TaskChange]) -> list[TaskChange]:
    """Decide, corrected over all tasks (S. Holm, 1979), and over all cells, of the comparison."""
    of_tasks = iter(holm([task.difference.p for task in tasks if task.difference is not None]))
    of_cells = iter(holm([difference.p for task in tasks for _, difference, _ in task.cells]))
    judged = []
    for task in tasks:
        outcome = _neutral()
        if task.difference is not None:
            outcome = _outcome(task.difference, next(of_tasks), task.metric)
        before, after = task.diverged
        if before or after:
            outcome = "worse" if not before else "better" if not after else "cannot tell"
        cells = tuple((place, d, _outcome(d, next(of_cells), task.metric)) for place, d, _ in task.cells)
        judged.append(replace(task, outcome=outcome, cells=cells))
    return judged


def _outcome(difference: Difference, adjusted: float, metric: str) -> Outcome:
    if adjusted > ALPHA or difference.value == 0:
        return "cannot tell"
    return "better" if (difference.value > 0) != less_is_better(metric) else "worse"


def _matched(pair: tuple[Entry, Entry]) -> tuple[Outcomes, Outcomes] | None:
    """Return the outcomes of a cell in both files where they are of the same units; None where they are not."""
    if any(entry.get("outcomes") is None for entry in pair):
        return None
    a, b = (
        unpack(entry["outcomes"], f"{entry['metric']} of {cell_key(entry['task'], entry['cell'])}") for entry in pair
    )
    same = len(a.scores) == len(b.scores) and a.counted == b.counted and np.array_equal(a.weights, b.weights)
    return (a, b) if same else None


def _paired(cells: Sequence[tuple[Outcomes, Outcomes]], shared: bool) -> Difference:
    if shared:
        # The same windows in every cell: a window with all its cells is what is independent of the others.
        first, second, weights = (
            np.array([sum(column) for column in zip_longest(*parts, fillvalue=0.0)])
            for parts in (
                [a.scores for a, _ in cells],
                [b.scores for _, b in cells],
                [a.weights for a, _ in cells],
            )
        )
        values = first.sum() / weights.sum(), second.sum() / weights.sum()
        counted = all(a.counted for a, _ in cells)
    else:
        totals = [float(a.weights.sum()) for a, _ in cells]
        counted = all(a.counted for a, _ in cells) and len(set(totals)) == 1
        # Each cell weighs the same in the mean, however many answers it has.
        scales = [1.0 if counted else 1 / (total * len(cells)) for total in totals]
        first = np.concatenate([a.scores * scale for (a, _), scale in zip(cells, scales, strict=True)])
        second = np.concatenate([b.scores * scale for (_, b), scale in zip(cells, scales, strict=True)])
        weights = np.concatenate([a.weights for a, _ in cells]) if counted else np.full(len(first), 1 / len(first))
        values = np.mean([a.value for a, _ in cells]), np.mean([b.value for _, b in cells])
    test = paired_test(first, second, weights, counted=counted)
    interval = paired_interval(first, second, weights, counted=counted)
    low, high = (None, None) if interval is None else interval
    return Difference(float(values[0]), float(values[1]), low, high, test.p, paired=True)


def _independent(pairs: Sequence[tuple[Entry, Entry]], shared: bool) -> Difference:
    first, second = (mean_of_cells([pair[side] for pair in pairs], shared) for side in (0, 1))
    interval = independent_difference(first, second)
    change = second[0] - first[0]
    if interval is None:
        return Difference(first[0], second[0], None, None, 1.0, paired=False)
    towards_zero = change - interval[0] if change > 0 else interval[1] - change
    z = NormalDist().inv_cdf(0.975)
    p = 1.0 if not change else 0.0 if not towards_zero else 2 * NormalDist().cdf(-z * abs(change) / towards_zero)
    return Difference(first[0], second[0], *interval, p, paired=False)


def mean_of_cells(entries: Sequence[Entry], shared: bool) -> tuple[float, float | None, float | None]:
    """Return the mean over cells with its interval."""
    value = sum(entry["value"] for entry in entries) / len(entries)
    interval = mean_interval([(entry["value"], entry["low"], entry["high"]) for entry in entries], shared=shared)
    return (value, None, None) if interval is None else (value, *interval)


def is_number(value: object) -> bool:
    """Whether a value of a result file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
