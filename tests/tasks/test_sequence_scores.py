"""Accuracies of sequence tasks on small cases by hand, against each other, and the published tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.tasks import IGNORE
from longrecall.tasks.published import (
    BASED_TEST,
    BASED_TRAINING,
    RESONA_LENGTHS,
    RESONA_TABLE_1,
    RESONA_TABLE_1_AVERAGES,
    RESONA_TABLE_1_COLUMNS,
    RESONA_TABLE_11,
    RESONA_WIDTHS,
)
from longrecall.tasks.sequence_registry import sequence_task_names
from longrecall.tasks.sequence_scores import (
    macro_accuracy,
    mad_accuracy,
    query_accuracy,
    shared_rows,
    token_accuracy,
    whole_accuracy,
)

Score = Callable[[np.ndarray, np.ndarray], float]
SCORES: tuple[Score, ...] = (token_accuracy, query_accuracy, whole_accuracy, macro_accuracy, mad_accuracy)


def test_a_case_by_hand() -> None:
    labels = np.array([[5, IGNORE, 5, 6], [IGNORE, 7, IGNORE, IGNORE], [IGNORE] * 4])
    said = np.array([[5, 9, 8, 6], [7, 7, 0, 0], [1, 2, 3, 4]])
    assert token_accuracy(said, labels) == 3 / 4
    assert query_accuracy(said, labels) == pytest.approx((2 / 3 + 1) / 2)
    assert whole_accuracy(said, labels) == 1 / 2
    # Tokens 5, 6 and 7 are asked for, 1/2, 1 and 1 of them right; 8 is said once and never right.
    assert macro_accuracy(said, labels) == pytest.approx((1 / 2 + 1 + 1 + 0) / 4)


def test_mad_accuracy_is_the_mean_over_batches_of_128_rows() -> None:
    """130 rows of one label each: 127 of 128 right and one said that nobody asks for, then both of 2 right."""
    labels = np.full((130, 1), 3)
    said = labels.copy()
    said[5] = 4
    first = (127 / 128 + 0) / 2
    assert mad_accuracy(said, labels) == pytest.approx((128 * first + 2 * 1.0) / 130)
    assert macro_accuracy(said, labels) == pytest.approx((129 / 130 + 0) / 2)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), width=st.integers(1, 8), classes=st.integers(1, 5))
def test_scores_against_loops(seed: int, rows: int, width: int, classes: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    labels = generator.integers(0, classes, (rows, width))
    labels[generator.random(labels.shape) < 0.3] = IGNORE
    labels[0, 0] = 0
    said = generator.integers(0, classes, (rows, width))
    pairs = [
        [(s, a) for s, a in zip(said_row, row, strict=True) if a != IGNORE]
        for said_row, row in zip(said.tolist(), labels.tolist(), strict=True)
    ]
    pairs = [row for row in pairs if row]
    flat = [pair for row in pairs for pair in row]
    shares = [sum(s == a for s, a in row) / len(row) for row in pairs]
    recalls = []
    for token in {token for pair in flat for token in pair}:
        answers = [s == a for s, a in flat if a == token]
        recalls.append(sum(answers) / max(1, len(answers)))
    assert token_accuracy(said, labels) == pytest.approx(sum(s == a for s, a in flat) / len(flat))
    assert query_accuracy(said, labels) == pytest.approx(sum(shares) / len(shares))
    assert whole_accuracy(said, labels) == pytest.approx(sum(share == 1 for share in shares) / len(shares))
    assert macro_accuracy(said, labels) == pytest.approx(sum(recalls) / len(recalls))


@pytest.mark.parametrize("score", SCORES)
def test_limits_and_bad_input(score: Score) -> None:
    labels = np.array([[1, IGNORE], [2, 3]])
    assert score(np.where(labels == IGNORE, 77, labels), labels) == 1
    assert score(labels + 1000, labels) == 0
    with pytest.raises(UserError, match=r"must have one shape \[rows, T\], got \(2, 3\) and \(2, 2\)"):
        score(np.zeros((2, 3), dtype=np.int64), labels)
    with pytest.raises(UserError, match="no position has a label"):
        score(labels, np.full_like(labels, IGNORE))


def test_shared_rows_counts_test_rows() -> None:
    train = np.array([[1, 2], [3, 4], [1, 2]])
    assert shared_rows(train, np.array([[1, 2], [2, 1], [3, 4], [3, 3]])) == 1 / 2
    assert shared_rows(train, np.array([[1, 2], [2, 1]], dtype=np.int32)) == 1 / 2
    with pytest.raises(UserError, match="rows of one length"):
        shared_rows(train, np.array([[1, 2, 3]]))


def test_published_tables_are_whole() -> None:
    assert set(RESONA_TABLE_1_COLUMNS) == set(sequence_task_names()) - {"mqar"}
    differing = []
    for model, rows in RESONA_TABLE_1.items():
        for index, (values, average) in enumerate(zip(rows, RESONA_TABLE_1_AVERAGES[model], strict=True)):
            assert (values is None) == (average is None)
            if values is not None and average is not None:
                assert len(values) == 6
                # Both are rounded to one digit: 0.05 for each.
                if abs(np.mean(values) - average) > 0.1:
                    differing.append((model, index))
    assert differing == [("transformer", 0), ("rwkv5", 1)], "two printed averages are not those of their rows"
    for rows in RESONA_TABLE_11.values():
        assert len(rows) == len(RESONA_LENGTHS) and all(len(row) == len(RESONA_WIDTHS) for row in rows)
        assert all(0 <= value <= 1 for row in rows for value in row)
    assert all(4 * cell.pairs <= cell.length for cell in (*BASED_TRAINING, *BASED_TEST))
