"""95% intervals of a few models: of a mean, of the slope of a line; and rank correlation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T_QUANTILES: tuple[float, ...] = (
    12.7062,
    4.302652729911275,
    3.1824,
    2.7764,
    2.5706,
    2.4469,
    2.3646,
    2.3060,
    2.2622,
    2.2281,
    2.2010,
)
T_QUANTILES += (2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739)
"""97.5% quantiles of Student's t with 1, 2, ... degrees of freedom."""


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95% t interval over three seeds."""
    if len(values) != 3:
        raise ValueError(f"three seeds expected, not {len(values)}")
    return statistics.mean(values), T_QUANTILES[1] * statistics.stdev(values) / math.sqrt(3)


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x through `points` points; `half` of the slope's 95% interval, None below 3 points."""

    points: int
    slope: float
    intercept: float
    half: float | None
    explained: float
    """Share of the variance of y (R squared)."""


def line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Least squares; None where it takes more different x than there are."""
    if len(set(x)) < 2:
        return None
    count, mean_x, mean_y = len(x), statistics.mean(x), statistics.mean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - mean_y) ** 2 for b in y)
    half = None
    if count > 2:
        half = T_QUANTILES[count - 3] * math.sqrt(left / (count - 2) / spread)
    return Line(count, slope, intercept, half, 1 - left / total if total else 0.0)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks. Not a number where one side is the same throughout."""
    if min(len(set(x)), len(set(y))) < 2:
        return math.nan
    both = [[statistics.mean(at for at, b in enumerate(sorted(of)) if b == a) for a in of] for of in (x, y)]
    return statistics.correlation(*both)
