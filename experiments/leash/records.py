"""The recorded runs of `experiment.py`: which runs an arm has, their measurements together, and differences of arms.

A record has `calls`: for each machine and day where and with what its `results` were made. A file of one call may be
that call itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from experiments.common.intervals import t_interval
from longrecall.evaluation.statistics import independent_difference, wilson_interval

FILE = "leash_demo.json"
BASE, NONE = "base", "none"
"""The model before training, and the arm without a leash."""
SEEDS = 3
"""That a difference over seeds takes."""
Row = dict[str, Any]
Value = tuple[float, float, float]
"""Value, and its 95% interval over answers or excerpts: it says nothing of other seeds."""
Measure = Callable[[list[Row]], Value]
"""Of some runs together."""


def calls(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each call's head with its `results`."""
    found: list[dict[str, Any]] = record.get("calls", [record])
    return found


def all_rows(record: dict[str, Any]) -> list[Row]:
    """The runs of all calls."""
    return [row for call in calls(record) for row in call["results"]]


def arms(record: dict[str, Any]) -> list[str]:
    """All arms, in the order in which they were recorded, the base first."""
    found = list(dict.fromkeys(row["arm"] for row in all_rows(record)))
    return sorted(found, key=lambda arm: (arm != BASE, arm != NONE))


def rows_of(record: dict[str, Any], arm: str) -> list[Row]:
    """The runs of an arm in the order of their seeds."""
    return sorted((row for row in all_rows(record) if row["arm"] == arm), key=lambda row: row["seed"])


def share(rows: list[Row], *cells: str) -> Value:
    """What part of the answers of these cells is right, over all runs, with the Wilson interval of the sum.

    Answers of one phone book hang together; the count that the recorded interval stands for is then smaller, and one
    cell of one run keeps its recorded interval.
    """
    found = [row["cells"][cell] for row in rows for cell in cells]
    if len(found) == 1:
        value, low, high, _ = found[0]
        return value, low, high
    asked = sum(count for *_, count in found)
    right = sum(value * count for value, _, _, count in found)
    low, high = wilson_interval(right, asked)
    return right / asked, low, high


def bits(rows: list[Row], span: str) -> Value:
    """Bits per byte, the mean over the runs; the excerpts are the same, so the interval is the mean interval."""
    found = [row["cells"][f"bits:{span}"][:3] for row in rows]
    value, low, high = (statistics.mean(numbers) for numbers in zip(*found, strict=True))
    return value, low, high


def beside(record: dict[str, Any], arm: str, other: str) -> tuple[list[Row], list[Row]]:
    """The runs of an arm and those of the same seeds of another one; the base has one run, for every seed."""
    rows, others = rows_of(record, arm), {row["seed"]: row for row in rows_of(record, other)}
    return rows, [others[0 if other == BASE else row["seed"]] for row in rows]


def answers_apart(record: dict[str, Any], arm: str, other: str, measure: Measure) -> Value:
    """An arm minus another one of the same seeds, with the 95% interval over answers, as if both were independent."""
    rows, others = beside(record, arm, other)
    one, two = measure(others[:1] if other == BASE else others), measure(rows)
    low, high = independent_difference(one, two) or (0.0, 0.0)
    return two[0] - one[0], low, high


def seeds_apart(record: dict[str, Any], arm: str, other: str, measure: Measure) -> tuple[float, float]:
    """The same seed by seed: mean over three seeds and half of its 95% interval (Student's t)."""
    pairs = zip(*beside(record, arm, other), strict=True)
    return t_interval([measure([row])[0] - measure([against])[0] for row, against in pairs])
