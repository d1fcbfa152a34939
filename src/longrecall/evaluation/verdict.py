"""What changed from one result file to another, in words: better, worse, or cannot tell, with the interval.

The demo prints these sentences and the report opens with them. Where two files were asked the same questions each
question is compared with itself (`longrecall.evaluation.paired`); else the two are independent samples.
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
CONTROL = "the same training without surgery"
_ORDER: tuple[Outcome | None, ...] = ("better", "worse", "cannot tell")
_RIGHT = ("accuracy", "acc", "exact_match")
"""Metrics that are the share of right answers."""


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


@dataclass(frozen=True)
class Statement:
    """What is said of one task: its name, what it asks, the outcome (None: nothing was compared), a sentence."""

    task: str
    title: str
    explanation: str
    outcome: Outcome | None
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """A comparison in words: `opening` sums it up, a statement for each task, `method` says how it was judged."""

    opening: str
    statements: tuple[Statement, ...]
    method: str

    @property
    def lines(self) -> list[str]:
        """The verdict as lines of plain text."""
        told = [f"  {statement.title}: {statement.sentence}" for statement in self.statements]
        return [self.opening, *told, *filter(None, [self.method])]


def compare_in_words(first: Result, second: Result, labels: tuple[str, str], about_first: str = "") -> Verdict | None:
    """Return what changed from the checked result `first` to `second`; None when they share no cell.

    Args:
        first, second: contents of result files of eval.
        labels: what to call the two.
        about_first: words on the first that follow its label, such as what kind of control it is.
    """
    found = _compared(first, second)
    if not found:
        return None
    statements = sorted((_statement(task, labels) for task in found), key=lambda s: _ORDER.index(s.outcome))
    tasks = [task for task in found if task.difference is not None]
    paired = [task.difference.paired for task in tasks if task.difference is not None]
    opening = f"{labels[1]} against {labels[0]}{f', {about_first}' if about_first else ''}. {_summary(statements)}"
    return Verdict(_capital(opening), tuple(statements), _method(paired, len(tasks)))


def all_in_words(comparisons: Sequence[tuple[Result, Result, tuple[str, str], str]]) -> list[Verdict]:
    """Return `compare_in_words` of each comparison that shares a cell; how they were judged is said once."""
    found = [verdict for verdict in (compare_in_words(*parts) for parts in comparisons) if verdict is not None]
    later = [{verdict.method for verdict in found[place + 1 :]} for place in range(len(found))]
    return [
        replace(verdict, method="" if verdict.method in rest else verdict.method)
        for verdict, rest in zip(found, later, strict=True)
    ]


def describe_in_words(result: Result, label: str) -> Verdict | None:
    """Return what one checked result says of its checkpoint; None when it measured nothing."""
    statements = []
    for task, metric in _first_metrics(result).items():
        statements.append(_described(task, metric, entries_of(result, task, metric), result))
    if not statements:
        return None
    return Verdict(f"What was measured of {label}; nothing is compared here.", tuple(statements), "")


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
        {**entry, **{key: entry.get(key) if _is_number(entry.get(key)) else None for key in numbers}}
        for entry in result["results"]
        if (entry["task"], entry["metric"]) == (task, metric)
    ]


def common_cells(first: Result, second: Result, task: str, metric: str) -> list[tuple[Entry, Entry]]:
    """Return the entries of the cells that both results measured, in the order of the first."""
    ours = entries_of(first, task, metric)
    theirs = {cell_key(task, e["cell"]): e for e in entries_of(second, task, metric)}
    return [(e, theirs[cell_key(task, e["cell"])]) for e in ours if cell_key(task, e["cell"]) in theirs]


# ---- numbers


@dataclass(frozen=True)
class _Task:
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


def _first_metrics(result: Result) -> dict[str, str]:
    metrics: dict[str, str] = {}
    for entry in result["results"]:
        metrics.setdefault(entry["task"], entry["metric"])
    return metrics


def _compared(first: Result, second: Result) -> list[_Task]:
    found = []
    for task, metric in _first_metrics(first).items():
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
        found.append(_Task(task, metric, whole, _neutral(), tuple(cells), counts, len(pairs)))
    return _judged(found)


def _neutral() -> Outcome:
    return "cannot tell"


def _judged(tasks: Sequence[_Task]) -> list[_Task]:
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
    first, second = (_mean([pair[side] for pair in pairs], shared) for side in (0, 1))
    interval = independent_difference(first, second)
    change = second[0] - first[0]
    if interval is None:
        return Difference(first[0], second[0], None, None, 1.0, paired=False)
    towards_zero = change - interval[0] if change > 0 else interval[1] - change
    z = NormalDist().inv_cdf(0.975)
    p = 1.0 if not change else 0.0 if not towards_zero else 2 * NormalDist().cdf(-z * abs(change) / towards_zero)
    return Difference(first[0], second[0], *interval, p, paired=False)


def _mean(entries: Sequence[Entry], shared: bool) -> tuple[float, float | None, float | None]:
    """Return the mean over cells with its interval."""
    value = sum(entry["value"] for entry in entries) / len(entries)
    interval = mean_interval([(entry["value"], entry["low"], entry["high"]) for entry in entries], shared=shared)
    return (value, None, None) if interval is None else (value, *interval)


# ---- words


def _statement(task: _Task, labels: tuple[str, str]) -> Statement:
    words = wording_of(task.name)
    parts = [f"{_capital(task.outcome)}."]
    if task.difference is not None:
        parts.append(_change(task.difference, task.outcome, task.metric, labels))
        parts.append(_cells(task))
    for label, diverged in zip(labels, task.diverged, strict=True):
        if diverged:
            parts.append(f"In {diverged} of {task.count} settings only {label} gives no finite number.")
    if task.difference is None and not any(task.diverged):
        parts.append("Both give no finite number.")
    return Statement(task.name, _capital(words.title), words.explanation, task.outcome, " ".join(filter(None, parts)))


def _change(difference: Difference, outcome: Outcome, metric: str, labels: tuple[str, str]) -> str:
    first, second = _value(difference.first, metric), _value(difference.second, metric)
    values = f"{_lead(metric)}{labels[0]} {first}, {labels[1]} {second}"
    if difference.low is None or difference.high is None:
        return f"{values}; too few measurements for an interval."
    kind = "95% interval" + ("; fewer is better" if less_is_better(metric) else "")
    if difference.low > 0 or difference.high < 0:
        ends = sorted((abs(difference.low), abs(difference.high)))
        far = f"{_apart(ends[0], metric)} to {_apart(ends[1], metric, unit=True)}"
        chance = "" if outcome != "cannot tell" else "; among so many comparisons that can be chance"
        return f"{values}, {far} {'more' if difference.low > 0 else 'fewer'} ({kind}){chance}."
    span = f"{_apart(-difference.low, metric, unit=True)} fewer and {_apart(difference.high, metric)} more"
    return f"{values}; the difference lies between {span} ({kind})."


def _cells(task: _Task) -> str:
    """Where it changed: how many cells are clear, and the clearest one; nothing for a task of one cell."""
    if len(task.cells) < 2:
        return ""
    parts = []
    for outcome in ("better", "worse"):
        clear = [(place, d) for place, d, found in task.cells if found == outcome]
        if clear:
            place, most = max(clear, key=lambda cell: abs(cell[1].value))
            change = f"{_value(most.first, task.metric)} to {_value(most.second, task.metric)}"
            parts.append(f"{outcome} in {len(clear)} of {len(task.cells)} settings, most {place} ({change})")
    if not parts:
        return "" if task.outcome == "cannot tell" else f"No single one of the {len(task.cells)} settings shows it."
    return f"Clearly {'; '.join(parts)}."


def _described(task: str, metric: str, entries: Sequence[Entry], result: Result) -> Statement:
    words = wording_of(task)
    known = [entry for entry in entries if entry["value"] is not None]
    if not known:
        return Statement(task, _capital(words.title), words.explanation, None, "No finite number anywhere.")
    value, low, high = _overall(task, metric, known, result)
    sentence = f"{_lead(metric)}{_value(value, metric)}"
    if low is not None and high is not None and low < high:
        sentence += f" (95% interval {_value(low, metric)} to {_value(high, metric)})"
    if len(known) > 1:
        worst = (max if less_is_better(metric) else min)(known, key=lambda entry: entry["value"])
        sentence += (
            f", over {len(known)} settings; worst {words.place(worst['cell'])}, {_value(worst['value'], metric)}"
        )
    if len(known) < len(entries):
        sentence += f"; no finite number in {len(entries) - len(known)} more"
    return Statement(task, _capital(words.title), words.explanation, None, f"{sentence}.")


def _overall(
    task: str, metric: str, known: Sequence[Entry], result: Result
) -> tuple[float, float | None, float | None]:
    """Return the file's own number over all cells with its interval where its summary has them, else the mean."""
    intervals = result.get("summary_intervals")
    for name in (f"{task}.{metric}", task):
        value, ends = result["summary"].get(name), intervals.get(name) if isinstance(intervals, dict) else None
        if _is_number(value) and isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends)):
            return float(value), float(ends[0]), float(ends[1])
    return _mean(known, wording_of(task).shared)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _summary(statements: Sequence[Statement]) -> str:
    parts = []
    for outcome in _ORDER:
        names = [statement.title.lower() for statement in statements if statement.outcome == outcome]
        if names:
            parts.append(f"{_capital(outcome or '')}: {', '.join(names)}.")
    return " ".join(parts)


def _method(paired: Sequence[bool], tasks: int) -> str:
    if not paired:
        return ""
    if all(paired):
        how = "Both were asked the same questions, so each question is compared with itself"
    elif any(paired):
        how = "Each question is compared with itself where both were asked the same ones"
    else:
        how = "The two are compared as independent samples, because they do not hold answers to the same questions"
    many = f"; better and worse allow for having compared {tasks} tasks" if tasks > 1 else ""
    return f"{how}{many}."


def _lead(metric: str) -> str:
    return "Right answers: " if metric in _RIGHT else f"{_capital(metric.replace('_', ' '))}: "


def _value(value: float, metric: str) -> str:
    return f"{value:.1%}" if metric in _RIGHT else f"{value:.3f}"


def _apart(distance: float, metric: str, unit: bool = False) -> str:
    if metric not in _RIGHT:
        return f"{distance:.3f}"
    return f"{100 * distance:.1f}" + (" points" if unit else "")


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]
