"""Intervals: Wilson for shares, corrected where several answers share a sequence, and the bootstrap for means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]


def wilson_interval(successes: float, count: float, level: float = 0.95) -> Interval:
    """Return the Wilson score interval of a share (E. B. Wilson, 1927); (0, 1) when nothing was counted.

    `successes` and `count` may be fractions, as effective sample sizes are.
    """
    if count <= 0:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf(0.5 + level / 2) ** 2
    share = successes / count
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count) / (1 + z2 / count)
    # At the ends the exact bound is the share itself; rounding must not push the interval off it.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def effective_count(successes: ArrayLike, counts: ArrayLike) -> float:
    """Return how many independent answers the answers of some sequences are worth.

    `successes`, `counts` [sequences]: right answers and answers of each sequence. The design effect (L. Kish, 1965) is
    the variance of the share between sequences (ratio estimator) over the variance if answers were independent; it is
    not taken below 1. Where it cannot be estimated (one sequence, or all answers alike) a sequence counts as one
    answer, which is the widest honest interval.
    """
    right, asked = np.asarray(successes, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    right, asked = right[asked > 0], asked[asked > 0]
    clusters, total = len(asked), float(asked.sum())
    if clusters == 0:
        return 0.0
    if clusters == total:
        return total
    share = float(right.sum()) / total
    independent = share * (1 - share) / total
    if clusters == 1 or independent == 0.0:
        return float(clusters)
    between = clusters / (clusters - 1) * float(((right - share * asked) ** 2).sum()) / total**2
    return total / max(1.0, between / independent)


def clustered_wilson_interval(successes: ArrayLike, counts: ArrayLike, level: float = 0.95) -> Interval:
    """Return the Wilson interval of a share whose answers come in sequences; see `effective_count`."""
    total = float(np.sum(np.asarray(counts, dtype=np.float64)))
    if total == 0:
        return 0.0, 1.0
    share = float(np.sum(np.asarray(successes, dtype=np.float64))) / total
    effective = effective_count(successes, counts)
    return wilson_interval(share * effective, effective, level)


Bounded = tuple[float, float | None, float | None]
"""A value with the low and the high end of its interval; None where it has none."""


def mean_interval(values: Sequence[Bounded], *, shared: bool = False) -> Interval | None:
    """Return the interval of the unweighted mean of values that have intervals; None where one has none.

    Half-widths of independent values add in squares. `shared` values rest on the same units and may all stray to one
    side together; theirs add as they are.
    """
    if not values or any(low is None or high is None for _, low, high in values):
        return None
    mean = sum(value for value, *_ in values) / len(values)
    below = [value - low for value, low, _ in values if low is not None]
    above = [high - value for value, _, high in values if high is not None]
    add = sum if shared else lambda parts: math.hypot(*parts)
    return mean - add(below) / len(values), mean + add(above) / len(values)


def independent_difference(first: Bounded, second: Bounded) -> Interval | None:
    """Return the interval of second - first, as if the two were independent; None where one has no interval.

    Square-and-add of the two intervals (R. G. Newcombe, 1998, method 10).
    """
    (one, one_low, one_high), (other, other_low, other_high) = first, second
    if one_low is None or one_high is None or other_low is None or other_high is None:
        return None
    change = other - one
    return (
        change - math.hypot(other - other_low, one_high - one),
        change + math.hypot(other_high - other, one - one_low),
    )


def bootstrap_ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> Interval | None:
    """Return the percentile bootstrap interval of sum(numerators) / sum(denominators), resampling the entries.

    One entry per sequence, e.g. bits and bytes. None with fewer than two entries: one sequence has no spread.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(top) < 2:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    ratios: NDArray[np.float64] = np.empty(resamples)
    # Blocks keep the index table small however many entries there are.
    block = max(1, 1_000_000 // len(top))
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        chosen = np.floor(generator.random((size, len(top))) * len(top)).astype(np.int64)
        ratios[start : start + size] = top[chosen].sum(axis=1) / bottom[chosen].sum(axis=1)
    low, high = np.quantile(ratios, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def bootstrap_mean_interval(
    values: ArrayLike, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> Interval | None:
    """Return the percentile bootstrap interval of the mean of `values`; None with fewer than two."""
    numbers = np.asarray(values, dtype=np.float64)
    return bootstrap_ratio_interval(numbers, np.ones_like(numbers), seed=seed, resamples=resamples, level=level)
