"""What changed from one result file to another, in words: better, worse, or cannot tell, with the interval.

The demo prints these sentences and the report opens with them; `longrecall.evaluation.differences` has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longrecall.evaluation.comparison import less_is_better
from longrecall.evaluation.differences import (
    Difference,
    Entry,
    Outcome,
    Result,
    TaskChange,
    changes,
    entries_of,
    first_metrics,
    is_number,
    mean_of_cells,
)
from longrecall.tasks.registry import wording_of

CONTROL = "the same training without surgery"
_ORDER: tuple[Outcome | None, ...] = ("better", "worse", "cannot tell")
_RIGHT = ("accuracy", "acc", "exact_match")
"""Metrics that are the share of right answers."""


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
    found = changes(first, second)
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
    for task, metric in first_metrics(result).items():
        statements.append(_described(task, metric, entries_of(result, task, metric), result))
    if not statements:
        return None
    return Verdict(f"What was measured of {label}; nothing is compared here.", tuple(statements), "")


def _statement(task: TaskChange, labels: tuple[str, str]) -> Statement:
    words = wording_of(task.name)
    parts = [f"{_capital(task.outcome)}."]
    if task.difference is not None:
        parts.append(_change(task.difference, task.outcome, task.metric, labels))
        parts.append(_cells(task))
    for label, diverged in zip(labels, task.diverged, strict=True):
        if diverged:
            parts.append(f"In {diverged} of {task.count} settings only {label} gives no finite number.")
    if task.difference is None and not any(task.diverged):
        parts.append("Neither gives a finite number.")
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
        chance = "" if outcome != "cannot tell" else "; with so many comparisons, that can be chance"
        return f"{values}, {far} {'more' if difference.low > 0 else 'fewer'} ({kind}){chance}."
    span = f"{_apart(-difference.low, metric, unit=True)} fewer and {_apart(difference.high, metric)} more"
    return f"{values}; the difference lies between {span} ({kind})."


def _cells(task: TaskChange) -> str:
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
        return (
            "" if task.outcome == "cannot tell" else (f"No single setting of the {len(task.cells)} shows it by itself.")
        )
    return f"Clearly {'; '.join(parts)}."


def _described(task: str, metric: str, entries: Sequence[Entry], result: Result) -> Statement:
    words = wording_of(task)
    known = [entry for entry in entries if entry["value"] is not None]
    if not known:
        return Statement(
            task, _capital(words.title), words.explanation, None, "It gives no finite number in any setting."
        )
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
        if is_number(value) and isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends)):
            return float(value), float(ends[0]), float(ends[1])
    return mean_of_cells(known, wording_of(task).shared)


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
    many = f" The verdicts allow for the fact that {tasks} tasks were compared." if tasks > 1 else ""
    return f"{how}.{many}"


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
