"""Paired tests against closed forms, published numbers, all sign patterns, and their behaviour in simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.evaluation import paired
from longrecall.evaluation.paired import adjusted_wald, holm, paired_interval, paired_test


def mcnemar(gained: int, lost: int) -> float:
    """The two-sided exact binomial test at 1/2, as McNemar's test is defined."""
    pairs = gained + lost
    tail = sum(math.comb(pairs, k) for k in range(min(gained, lost) + 1)) / 2**pairs
    return min(1.0, 2 * tail)


def units(gained: int, lost: int, equal: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first = np.array([0] * gained + [1] * lost + [1] * equal)
    second = np.array([1] * gained + [0] * lost + [1] * equal)
    return first, second, np.ones(len(first))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 50))
def test_single_answers_give_mcnemar(gained: int, lost: int, equal: int) -> None:
    found = paired_test(*units(gained, lost, equal), counted=True)
    assert found.method == "McNemar, exact"
    # Both are sums of at most 121 binomial terms in float64.
    assert found.p == pytest.approx(mcnemar(gained, lost), rel=1e-10)


def test_thousands_of_pairs_neither_overflow_nor_take_long() -> None:
    assert paired_test(*units(2000, 1900, 96), counted=True).p == pytest.approx(mcnemar(2000, 1900), rel=1e-9)
    assert 0 <= paired_test(*units(4096, 0, 0), counted=True).p < 1e-300


def over_all_signs(change: list[float]) -> float:
    observed = abs(sum(change))
    sums = [
        abs(sum(s * c for s, c in zip(signs, change, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(change))
    ]
    return float(np.mean([value >= observed for value in sums]))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9))
def test_counts_agree_with_every_sign_pattern(change: list[int]) -> None:
    first = np.maximum(0, -np.array(change))
    found = paired_test(first, first + change, np.full(len(change), 8), counted=True)
    assert found.method == "sign flips, exact"
    # Zeros double the patterns on both sides of the fraction.
    assert found.p == pytest.approx(over_all_signs([float(c) for c in change]), rel=1e-12)


@settings(deadline=None, max_examples=40)
# Sixteenths are exact in float64, so sums that tie do so in the reference too.
@given(st.lists(st.integers(-48, 48).map(lambda n: n / 16), min_size=1, max_size=9))
def test_few_scores_agree_with_every_sign_pattern(change: list[float]) -> None:
    found = paired_test(np.zeros(len(change)), change, np.ones(len(change)), counted=False)
    kept = [c for c in change if c != 0]
    assert found.p == pytest.approx(over_all_signs(kept) if kept else 1.0, rel=1e-12)


def test_random_signs_agree_with_the_exact_distribution() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 9, 60), rng.integers(0, 9, 60)
    weights = np.full(60, 8)
    exact = paired_test(first, second, weights, counted=True)
    drawn = paired_test(first, second, weights, counted=False)
    assert drawn.method == "sign flips, 20,000 draws"
    # Four standard errors of a share estimated from 20 000 draws.
    assert drawn.p == pytest.approx(exact.p, abs=4 * math.sqrt(exact.p * (1 - exact.p) / 20_000))
    assert paired_test(first, second, weights, counted=False) == drawn


def test_units_that_do_not_differ_leave_few_differences_exact() -> None:
    second = np.zeros(500)
    second[:10] = 0.25
    found = paired_test(np.zeros(500), second, np.ones(500), counted=False)
    assert (found.p, found.method) == (2 / 2**10, "sign flips, exact")


def test_a_p_value_from_draws_is_never_zero() -> None:
    found = paired_test(np.zeros(50), np.full(50, 0.3), np.ones(50), counted=False)
    assert found.p == pytest.approx(1 / (paired.DRAWS + 1))


def test_whole_numbers_too_many_for_the_exact_way_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "_MOST_STEPS", 10)
    assert "draws" in paired_test(*units(30, 10, 0), counted=True).method


def test_swapping_the_files_turns_the_sign_and_keeps_p() -> None:
    rng = np.random.default_rng(1)
    first, second, weights = rng.integers(0, 5, 40), rng.integers(0, 5, 40), np.full(40, 4)
    assert paired_test(first, second, weights, counted=True) == paired_test(second, first, weights, counted=True)
    forth = paired_interval(first, second, weights, counted=True)
    back = paired_interval(second, first, weights, counted=True)
    assert forth is not None and back is not None
    # Quantiles of the same resamples, mirrored; interpolation rounds in float64.
    assert forth == pytest.approx((-back[1], -back[0]), abs=1e-12)


def test_exchangeable_models_are_told_apart_at_most_as_often_as_alpha() -> None:
    rng = np.random.default_rng(2)
    rejected = 0
    for _ in range(400):
        # Both models share the difficulty of a sequence, so answers within one are far from independent.
        chance = rng.beta(0.5, 0.5, 40)
        first, second = rng.binomial(8, chance), rng.binomial(8, chance)
        rejected += paired_test(first, second, np.full(40, 8), counted=True).p <= 0.05
    # 5% of 400 with a standard deviation of 4.4: 33 is three of them above.
    assert rejected <= 33


@pytest.mark.parametrize(("both", "gained", "lost", "neither"), [(30, 6, 4, 10), (20, 0, 0, 4), (10, 20, 2, 40)])
def test_interval_against_its_formula(both: int, gained: int, lost: int, neither: int) -> None:
    n = both + gained + lost + neither
    p12, p21 = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = 1.959964 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    # The quantile above has six decimals.
    assert adjusted_wald(gained, lost, n) == pytest.approx((p12 - p21 - half, p12 - p21 + half), abs=1e-6)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_interval_holds_the_difference_and_has_a_width(gained: int, lost: int, equal: int) -> None:
    first, second, weights = units(gained, lost, equal)
    interval = paired_interval(first, second, weights, counted=True)
    assert interval is not None
    assert -1 <= interval[0] <= (gained - lost) / len(first) <= interval[1] <= 1
    assert interval[1] - interval[0] > 0


def test_coverage_of_both_intervals() -> None:
    rng = np.random.default_rng(3)
    single = clustered = 0
    trials = 300
    for _ in range(trials):
        chance = rng.beta(0.5, 0.5, 60)
        # The second model is right 10 points more often, wherever there is room: E[difference] = 0.1 E[1 - chance].
        better = chance + 0.1 * (1 - chance)
        low, high = paired_interval(rng.binomial(1, chance), rng.binomial(1, better), np.ones(60), counted=True) or (
            0,
            0,
        )
        single += low <= 0.05 <= high
        low, high = paired_interval(rng.binomial(8, chance), rng.binomial(8, better), np.full(60, 8), counted=True) or (
            0,
            0,
        )
        clustered += low <= 0.05 <= high
    # Nominal 95%, standard deviation 1.3 points; the percentile bootstrap of 60 units is known to fall 1 to 2 short.
    assert single / trials > 0.91
    assert clustered / trials > 0.90


@pytest.mark.parametrize(("units", "quantile"), [(4, 3.182), (7, 2.447), (11, 2.228), (31, 2.042), (121, 1.980)])
def test_intervals_of_few_units_are_widened_as_students(units: int, quantile: float) -> None:
    from statistics import NormalDist

    level = paired._widened(0.95, units)
    reached = NormalDist().inv_cdf(0.5 + level / 2) / math.sqrt(units / (units - 1))
    # Tables of t at 97.5%; the series is within 2% at three degrees of freedom and exact to three digits from six on.
    assert reached == pytest.approx(quantile, rel=0.02 if units < 7 else 0.001)


def test_coverage_with_eight_units() -> None:
    rng = np.random.default_rng(4)
    inside = 0
    for _ in range(300):
        change = rng.normal(0.3, 1.0, 8)
        low, high = paired_interval(np.zeros(8), change, np.ones(8), counted=False) or (0, 0)
        inside += low <= 0.3 <= high
    # Nominal 95% with a standard deviation of 1.3 points; the plain percentile interval reaches about 88%.
    assert inside / 300 > 0.915


def test_equal_counts_keep_a_width_and_equal_scores_have_no_interval() -> None:
    same = np.array([3.0, 8.0, 5.0])
    low, high = paired_interval(same, same, [8, 8, 9], counted=True) or (0, 0)
    assert low < 0 < high
    assert paired_interval(same, same, [8, 8, 9], counted=False) is None
    assert paired_interval([3.0], [4.0], [8], counted=False) is None


def test_holm_against_a_worked_example() -> None:
    # 0.01 * 4, 0.02 * 3, max(0.06, 0.03 * 2), 0.9 * 1.
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([]) == []
    assert holm([0.7, 0.6]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_is_between_the_plain_and_bonferronis(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for plain, corrected in zip(p_values, adjusted, strict=True):
        assert plain <= corrected <= min(1.0, len(p_values) * plain)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert [adjusted[index] for index in order] == sorted(adjusted)
