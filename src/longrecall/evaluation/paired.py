"""Paired statistics: two models on the same examples. Exact tests where they can be, intervals of the difference.

Both models are asked the same questions, so their difference is judged example by example: whatever makes a question
hard for both drops out, and a small gain shows with far fewer samples than two separate intervals need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longrecall.evaluation.statistics import Interval, bootstrap_ratio_interval

DRAWS = 20_000
"""Random sign patterns where all of them are too many; the least p-value is then 1 / 20 001."""
_MOST_FLIPPED = 16
"""Differences whose sign patterns are all tried: 65 536 at most."""
_MOST_STEPS = 2e8
"""Additions that the exact distribution of whole numbers may take: about a third of a second."""


@dataclass(frozen=True)
class PairedTest:
    """A two-sided p-value and how it was found."""

    p: float
    method: str


def paired_test(first: ArrayLike, second: ArrayLike, weights: ArrayLike, *, counted: bool, seed: int = 0) -> PairedTest:
    """Test whether two models score alike, from their scores on the same units, float [units] each.

    The null hypothesis is that the two are exchangeable on every unit, so the sign of each difference is a fair coin
    (R. A. Fisher, 1935); the statistic is the absolute sum of differences. With right-or-wrong outcomes (`counted`,
    all `weights` 1) this is the exact test of Q. McNemar (1947). Whole numbers (`counted`) are tested exactly through
    the distribution of their sum, few others over all sign patterns, the rest over `DRAWS` random ones.
    """
    change = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    change = change[change != 0]
    single = counted and bool((np.asarray(weights) <= 1).all())
    if counted:
        sizes = np.abs(change).astype(np.int64)
        if float(len(sizes)) * float(sizes.sum()) <= _MOST_STEPS:
            p = _exact_of_whole(sizes, abs(round(float(change.sum()))))
            return PairedTest(p, "McNemar, exact" if single else "sign flips, exact")
    if len(change) <= _MOST_FLIPPED:
        return PairedTest(_over_all_patterns(change), "sign flips, exact")
    return PairedTest(_over_draws(change, seed), f"sign flips, {DRAWS:,} draws")


def _exact_of_whole(sizes: NDArray[np.int64], observed: int) -> float:
    """Return P(|sum of +-sizes| >= observed) under fair signs."""
    total = int(sizes.sum())
    # chance[t]: the sizes with a plus sum to t; the signed sum is then 2 t - total.
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    reached = 0
    for size in sizes.tolist():
        chance[: reached + size + 1] *= 0.5
        # The right side is copied first: the two slices overlap.
        chance[size : reached + size + 1] += chance[: reached + 1].copy()
        reached += size
    sums = np.abs(2 * np.arange(total + 1) - total)
    return min(1.0, float(chance[sums >= observed].sum()))


def _over_all_patterns(change: NDArray[np.float64]) -> float:
    sums = np.zeros(1)
    for value in change.tolist():
        sums = np.concatenate((sums + value, sums - value))
    return float((np.abs(sums) >= _just_below(change)).mean())


def _over_draws(change: NDArray[np.float64], seed: int) -> float:
    generator = np.random.Generator(np.random.PCG64(seed))
    least, hits = _just_below(change), 0
    block = max(1, 2_000_000 // len(change))
    for start in range(0, DRAWS, block):
        signs = np.where(generator.random((min(block, DRAWS - start), len(change))) < 0.5, -1.0, 1.0)
        hits += int((np.abs(signs @ change) >= least).sum())
    # The observed pattern counts as one of the draws, so that p is never 0 (Phipson and Smyth, 2010).
    return (hits + 1) / (DRAWS + 1)


def _just_below(change: NDArray[np.float64]) -> float:
    """Return the observed sum less what rounding may take from the same sum in another order."""
    return abs(float(change.sum())) - 1e-12 * float(np.abs(change).sum())


def paired_interval(
    first: ArrayLike, second: ArrayLike, weights: ArrayLike, *, counted: bool, seed: int = 0, level: float = 0.95
) -> Interval | None:
    """Return the interval of (sum(second) - sum(first)) / sum(weights), resampling units.

    Where every unit is won, lost or drawn as a whole (one answer each above all) the interval is that of Bonett and
    Price (2012), which keeps its width when no unit differs; else it is the percentile bootstrap,
    widened for few units as T. Hesterberg (The American Statistician 69, 2015) does.
    None where there is nothing to resample: a single unit, or scores of which none differs.
    """
    size = np.asarray(weights, dtype=np.float64)
    change = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    whole = counted and bool((size == size[0]).all()) and bool(((change == 0) | (np.abs(change) == size)).all())
    if whole:
        return adjusted_wald(int((change > 0).sum()), int((change < 0).sum()), len(change), level)
    if not change.any():
        return adjusted_wald(0, 0, len(change), level) if counted else None
    return bootstrap_ratio_interval(change, size, seed=seed, level=_widened(level, len(change)))


def _widened(level: float, units: int) -> float:
    """Return the level whose normal quantile is Student's of `level`, times sqrt(n / (n - 1)).

    A plain percentile interval of n units is too narrow by that much. The quantile is its Cornish-Fisher series, within
    2% from four units on; fewer cannot be saved by any bootstrap.
    """
    if units < 2:
        return level
    z, freedom = NormalDist().inv_cdf(0.5 + level / 2), units - 1
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    student += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return 2 * NormalDist().cdf(student * math.sqrt(units / freedom)) - 1


def adjusted_wald(gained: int, lost: int, pairs: int, level: float = 0.95) -> Interval:
    """Return the interval of a difference of paired shares, (gained - lost) / pairs.

    The adjusted Wald interval of D. G. Bonett and R. M. Price, Statistics and Computing 22 (2012), with one pair
    added to each kind of disagreement. `gained`: pairs that only the second got right; `lost`: only the first.
    """
    up, down = (gained + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
    half = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
    observed = (gained - lost) / pairs
    # The centre is pulled towards 0; what was observed must stay inside.
    return max(-1.0, min(observed, up - down - half)), min(1.0, max(observed, up - down + half))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for having made all these tests (S. Holm, 1979), in their order.

    Rejecting those at most 0.05 keeps the chance of even one false rejection at 0.05, whatever their dependence.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
