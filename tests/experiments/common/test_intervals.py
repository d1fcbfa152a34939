"""Intervals over a few models, and rank correlation."""

from __future__ import annotations

import math

import pytest

from experiments.common import intervals


def test_wrong_number_of_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="three seeds"):
        intervals.t_interval([0.1, 0.2])


def test_rank_correlation() -> None:
    """By hand: ranks 0, 1.5, 1.5, 3 and 1, 0, 2.5, 2.5 less 1.5 have products of 2.25 and squares of 4.5."""
    assert intervals.rank_correlation([1, 2, 3], [10, 20, 900]) == pytest.approx(1)
    assert intervals.rank_correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert intervals.rank_correlation([1, 2, 2, 5], [3, 1, 4, 4]) == pytest.approx(2.25 / 4.5)
    assert math.isnan(intervals.rank_correlation([1, 1, 1], [1, 2, 3]))
