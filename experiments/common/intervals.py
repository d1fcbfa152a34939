"""95% intervals of a few models: of a mean, of the slope of a line; and rank correlation."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Run = TypeVar("_Run")

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
NORMAL_QUANTILE = 1.959964
DRAWS = 2000
"""Of a bootstrap."""


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t; beyond the table by Cornish and Fisher's expansion, right to four decimals."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = NORMAL_QUANTILE
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / 4 / degrees + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / degrees**2 + third / degrees**3


def t_share(value: float, degrees: int) -> float:
    """Share of Student's t between -value and value, by the finite sums for whole degrees of freedom."""
    angle, odd = math.atan(value / math.sqrt(degrees)), degrees % 2
    square, total = math.cos(angle) ** 2, 0.0
    term = math.cos(angle) if odd else 1.0
    for index in range(1 + odd, degrees, 2):
        total += term
        term *= square * index / (index + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def t_quantile_of_all(degrees: int, many: int) -> float:
    """Of Student's t: what `many` values stay within, all of them, in 95% of cases or more (Bonferroni)."""
    low, high = 0.0, 1e6
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, degrees) < 1 - 0.05 / many else (low, middle)
    return high


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
        half = t_quantile(count - 2) * math.sqrt(left / (count - 2) / spread)
    return Line(count, slope, intercept, half, 1 - left / total if total else 0.0)


def bootstrap(
    groups: Sequence[Sequence[_Run]], measure: Callable[[list[list[_Run]]], float | None], seed: int = 0
) -> tuple[float, float] | None:
    """95% interval of a measure of runs over their seeds, made for few of them.

    Draws of as many runs as there are spread too little: two seeds would have an interval that holds the truth in half
    of all studies. So a draw takes one run less (McCarthy and Snowden 1985), which makes the variance of a mean right,
    and the ends of the percentile interval are moved away from the measure as far as Student's t is wider than the
    normal distribution. None where the runs themselves or half of the draws give no value, and where no kind of model
    has a second seed.

    Args:
        groups: the runs of every kind of model, one for each seed. A draw takes one less of each, with replacement.
        measure: of the groups of a draw; None where it cannot be told.
        seed: of the draws.
    """
    groups = [group for group in groups if group]
    degrees, middle = sum(len(group) - 1 for group in groups), measure([list(group) for group in groups])
    if not degrees or middle is None:
        return None
    g, found = random.Random(seed), []
    for _ in range(DRAWS):
        value = measure([g.choices(group, k=max(1, len(group) - 1)) for group in groups])
        if value is not None:
            found.append(value)
    if 2 * len(found) < DRAWS:
        return None
    found.sort()
    wider = t_quantile(degrees) / NORMAL_QUANTILE
    low, high = (found[round(share * (len(found) - 1))] for share in (0.025, 0.975))
    return middle + wider * (min(low, middle) - middle), middle + wider * (max(high, middle) - middle)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks. Not a number where one side is the same throughout."""
    if min(len(set(x)), len(set(y))) < 2:
        return math.nan
    both = [[statistics.mean(at for at, b in enumerate(sorted(of)) if b == a) for a in of] for of in (x, y)]
    return statistics.correlation(*both)
