"""Outcomes come back from a result file as they went in, and damage is told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.evaluation.outcomes import pack_answers, pack_scores, unpack

COUNTS = st.lists(
    st.integers(0, 300).flatmap(lambda asked: st.tuples(st.integers(0, asked), st.just(asked))), min_size=1
)


@given(COUNTS.filter(lambda units: any(asked for _, asked in units)))
def test_answers_come_back(units: list[tuple[int, int]]) -> None:
    right, asked = zip(*units, strict=True)
    found = unpack(json.loads(json.dumps(pack_answers(right, asked))), "x")
    assert found.counted
    assert found.scores.tolist() == list(right) and found.weights.tolist() == list(asked)
    assert found.value == sum(right) / sum(asked)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_single_answers_take_a_bit_each(right: list[bool]) -> None:
    packed = pack_answers(right, np.ones(len(right), dtype=int))
    assert packed["form"] == "bits" and len(packed["right"]) == 2 * -(-len(right) // 8)
    assert unpack(packed, "x").scores.tolist() == [float(value) for value in right]


def test_the_written_form_is_pinned() -> None:
    # 1 0 1 1 0 0 1 0 | 1: most significant bit first, filled with zeros.
    assert pack_answers([1, 0, 1, 1, 0, 0, 1, 0, 1], [1] * 9) == {"form": "bits", "units": 9, "right": "b280"}
    # 3 bits each: 101 010 100 -> 1010 1010 | 0000 0000.
    expected = {"form": "counts", "units": 3, "bits": 3, "right": "aa00", "asked": 5}
    assert pack_answers([5, 2, 4], [5, 5, 5]) == expected


@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(0.5, 1e4)), min_size=1))
def test_scores_come_back_to_the_sixth_decimal(units: list[tuple[float, float]]) -> None:
    scores, weights = zip(*units, strict=True)
    found = unpack(json.loads(json.dumps(pack_scores(scores, weights))), "x")
    # Rounding to six decimals moves a number by half of the last; the rest is float64 at 1e4.
    assert found.scores == pytest.approx(scores, abs=5.1e-7)
    assert found.weights == pytest.approx(weights, abs=5.1e-7)
    assert not found.counted


def test_scores_alone_are_a_mean() -> None:
    packed = pack_scores([0.25, 1.0, 0.5, 0.25])
    assert packed == {"form": "scores", "scores": "0.25 1 0.5 0.25"}
    assert unpack(packed, "x").value == 0.5


@pytest.mark.parametrize("scores", [[np.nan, 1.0], [np.inf]])
def test_scores_of_a_diverged_model_are_not_kept(scores: list[float]) -> None:
    assert pack_scores(scores) is None


def test_counts_that_cannot_be_are_refused() -> None:
    for right, asked in [([2], [1]), ([-1], [1]), ([0], [0]), ([], []), ([1, 1], [1])]:
        with pytest.raises(ValueError, match="right"):
            pack_answers(right, asked)
    with pytest.raises(ValueError, match="one number for each unit"):
        pack_scores([1.0], [1.0, 2.0])


GOOD = pack_answers([5, 2, 4], [5, 4, 5])


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "bits",
        {},
        {"form": "other"},
        {"form": "bits", "units": 9, "right": "b2"},
        {"form": "bits", "units": 0, "right": ""},
        {"form": "bits", "units": 8, "right": "zz"},
        GOOD | {"asked": 3},
        GOOD | {"bits": 40},
        GOOD | {"asked": None},
        {"form": "scores", "scores": "1 x"},
        {"form": "scores", "scores": ""},
        {"form": "scores", "scores": [1.0]},
        {"form": "scores", "scores": "nan"},
        {"form": "scores", "scores": "1 2", "weights": "1"},
        {"form": "scores", "scores": "1 2", "weights": "0 0"},
        {"form": "scores", "scores": "1 2", "weights": "-1 2"},
    ],
)
def test_damage_is_told_with_its_place(damaged: Any) -> None:
    with pytest.raises(UserError, match=r"^a\.json: accuracy: its outcomes are damaged \(.+\); run eval again$"):
        unpack(damaged, "a.json: accuracy")
