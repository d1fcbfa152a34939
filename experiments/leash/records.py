"""The recorded runs of `experiment.py`: which runs an arm has, and their measurements together."""

from __future__ import annotations

import statistics
from typing import Any

from longrecall.evaluation.statistics import wilson_interval

FILE = "leash_demo.json"
Row = dict[str, Any]
Value = tuple[float, float, float]
"""Value, and its 95% interval over answers or excerpts: it says nothing of other seeds."""


def arms(record: dict[str, Any]) -> list[str]:
    """All arms, in the order in which they were recorded, the base first."""
    found = list(dict.fromkeys(row["arm"] for row in record["results"]))
    return sorted(found, key=lambda arm: (arm != "base", arm != "none"))


def rows_of(record: dict[str, Any], arm: str) -> list[Row]:
    """The runs of an arm in the order of their seeds."""
    return sorted((row for row in record["results"] if row["arm"] == arm), key=lambda row: row["seed"])


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
