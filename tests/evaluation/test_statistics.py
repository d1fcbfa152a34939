"""Intervals against known numbers, and their coverage in simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.evaluation.statistics import (
    bootstrap_mean_interval,
    bootstrap_ratio_interval,
    clustered_wilson_interval,
    effective_count,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_a_published_table(successes: int, count: int, low: float, high: float) -> None:
    # The table has four decimals.
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_is_ordered_and_symmetric(successes: int, count: int) -> None:
    successes = min(successes, count)
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= successes / count <= high <= 1
    other = wilson_interval(count - successes, count)
    # The two differ by rounding in float64 only.
    assert (1 - high, 1 - low) == pytest.approx(other, abs=1e-12)


def test_nothing_counted() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert clustered_wilson_interval([], []) == (0.0, 1.0)


def test_one_answer_per_sequence_is_plain_wilson() -> None:
    right = np.array([1, 0, 1, 1, 0])
    assert clustered_wilson_interval(right, np.ones(5)) == wilson_interval(3, 5)


def test_sequences_that_are_all_or_nothing_count_once() -> None:
    right = np.tile([0, 8], 50)
    # 100 sequences of identical answers are worth 100 answers; the factor m/(m-1) makes it 99.
    assert effective_count(right, np.full(100, 8)) == pytest.approx(99)


def test_cases_without_an_estimate_are_conservative() -> None:
    assert effective_count([8, 8, 8], [8, 8, 8]) == 3
    assert effective_count([3], [8]) == 1
    assert effective_count([0, 0], [8, 0]) == 1


def test_coverage_with_correlated_answers() -> None:
    rng = np.random.default_rng(0)
    inside = naive = 0
    trials = 400
    for _ in range(trials):
        # Each sequence has its own chance of a right answer, with mean 0.5.
        right = rng.binomial(8, rng.beta(0.5, 0.5, size=64))
        low, high = clustered_wilson_interval(right, np.full(64, 8))
        inside += low <= 0.5 <= high
        low, high = wilson_interval(right.sum(), 512)
        naive += low <= 0.5 <= high
    # Nominal 95%; 400 trials have a standard deviation of 1.1 points, so 92% is 2.8 sigma. The plain interval fails.
    assert inside / trials > 0.92
    assert naive / trials < 0.75


def test_bootstrap_matches_the_standard_error() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    interval = bootstrap_mean_interval(values)
    assert interval is not None
    half = 1.96 * values.std() / 20
    # 2000 resamples fix a 2.5% quantile to about 5% of the half-width; 15% is three times that.
    assert interval[0] == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert interval[1] == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert bootstrap_mean_interval(values) == interval
    assert bootstrap_mean_interval(values, seed=1) != interval


def test_bootstrap_of_a_constant_ratio_has_no_width() -> None:
    assert bootstrap_ratio_interval([2.0, 4.0, 6.0], [1, 2, 3]) == pytest.approx((2.0, 2.0))
    assert bootstrap_ratio_interval([2.0], [1]) is None
