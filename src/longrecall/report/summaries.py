"""The few numbers that answer "did it help?", with intervals, and their differences between two result files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from longrecall.report.inputs import Evaluation, Measurement
from longrecall.units import format_length

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


def mean(measurements: Iterable[Measurement]) -> Number:
    """Return the unweighted mean of independent cells; their half-widths add in squares."""
    cells = list(measurements)
    values = [cell.value for cell in cells if cell.value is not None]
    if not cells or len(values) < len(cells):
        return Number(None)
    value = sum(values) / len(cells)
    lows = [cell.value - cell.low for cell in cells if cell.value is not None and cell.low is not None]
    highs = [cell.high - cell.value for cell in cells if cell.value is not None and cell.high is not None]
    if len(lows) < len(cells) or len(highs) < len(cells):
        return Number(value)
    return Number(value, value - math.hypot(*lows) / len(cells), value + math.hypot(*highs) / len(cells))


def difference(after: Number, before: Number) -> Number:
    """Return after - before with its interval, as if the two were independent.

    Square-and-add of the two intervals (R. G. Newcombe, 1998, method 10). Both files usually ask the same questions,
    so the true interval is narrower.
    """
    if after.value is None or before.value is None:
        return Number(None)
    value = after.value - before.value
    if after.low is None or after.high is None or before.low is None or before.high is None:
        return Number(value)
    low = value - math.hypot(after.value - after.low, before.high - before.value)
    high = value + math.hypot(after.high - after.value, before.value - before.low)
    return Number(value, low, high)


def headlines(evaluations: Sequence[Evaluation]) -> list[Headline]:
    """Return the quantities that at least one file measured: all cells together, then the hardest ones."""
    found: list[Headline] = []
    books = _cells(evaluations, "phonebook", "accuracy")
    if books:
        found.append(Headline("phone book: most pairs recalled at 90% or better", True, 0, _capacity))
        found.append(_over("phone book: accuracy, all cells", "phonebook", "accuracy", True, 3))
        hardest = max(cell.cell.get("pairs", 0) for cell in books)
        name = f"phone book: accuracy at {hardest:g} pairs"
        found.append(_over(name, "phonebook", "accuracy", True, 3, "pairs", hardest))
    keys = _cells(evaluations, "passkey", "accuracy")
    if keys:
        found.append(_over("passkey: accuracy, all cells", "passkey", "accuracy", True, 3))
        longest = max(cell.cell.get("length", 0) for cell in keys)
        name = f"passkey: accuracy at {format_length(int(longest))} tokens"
        found.append(_over(name, "passkey", "accuracy", True, 3, "length", longest))
    copies = _cells(evaluations, "copying", "accuracy")
    if copies:
        longest = max(cell.cell.get("length", 0) for cell in copies)
        name = f"copying: strings of {longest:,} letters"
        found.append(_over(name, "copying", "accuracy", True, 3, "length", longest))
    stories = _cells(evaluations, "babilong", "accuracy")
    if stories:
        found.append(_over("stories: accuracy, all cells", "babilong", "accuracy", True, 3))
        longest = max(cell.cell.get("length", 0) for cell in stories)
        name = f"stories: accuracy at {format_length(int(longest))} tokens"
        found.append(_over(name, "babilong", "accuracy", True, 3, "length", longest))
    ranges = _cells(evaluations, "bits_per_byte", "bits_per_byte")
    ends = sorted({(cell.cell.get("start", 0), cell.cell.get("end", 0)) for cell in ranges})
    for start, end in dict.fromkeys([*ends[:1], *ends[-1:]]):
        name = f"bits per byte at positions {start:,.0f} to {end:,.0f}"
        found.append(_over(name, "bits_per_byte", "bits_per_byte", False, 3, "start", start))
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


def _cells(evaluations: Sequence[Evaluation], task: str, metric: str) -> list[Measurement]:
    return [cell for evaluation in evaluations for cell in evaluation.of(task, metric)]


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


def _capacity(evaluation: Evaluation) -> Number:
    return recorded(evaluation, "phonebook.capacity")


def _over(
    name: str,
    task: str,
    metric: str,
    more_is_better: bool,
    digits: int,
    key: str | None = None,
    wanted: float = 0,
) -> Headline:
    def number(evaluation: Evaluation) -> Number:
        return mean(m for m in evaluation.of(task, metric) if key is None or m.cell.get(key) == wanted)

    return Headline(name, more_is_better, digits, number)
