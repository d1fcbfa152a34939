"""Scoring answers: one forward pass instead of one generation per answer.

An answer is right iff, with the true answer fed in, the argmax is right at every one of its tokens. That equals exact
match of greedy decoding: greedy decoding emits the argmax given its own tokens so far, and as long as these are right
they are the true ones. At the first wrong argmax both notions fail. So the two agree answer by answer (up to ties and
rounding between two ways to compute one logit).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrecall.evaluation.reading import Predictions
from longrecall.tasks.encoding import answer_spans


@dataclass(frozen=True)
class Scores:
    """Of each sequence, [sequences] each: right answers, answers, right tokens, labelled tokens.

    `diverged`: a scored logit was not finite; an answer with such a logit is wrong. `close`: rounding could change the
    number of right answers; `close_tokens`: ... of right tokens.
    """

    right: NDArray[np.int64]
    asked: NDArray[np.int64]
    right_tokens: NDArray[np.int64]
    tokens: NDArray[np.int64]
    diverged: NDArray[np.bool_]
    close: NDArray[np.bool_]
    close_tokens: NDArray[np.bool_]


def score(labels: list[NDArray[np.int64]], predictions: Predictions) -> Scores:
    """Return what a batch got right; `labels`: the labels of each row, unpadded."""
    rows = [_score_row(row_labels, predictions, predictions.row == row) for row, row_labels in enumerate(labels)]
    counts = np.array([row[:4] for row in rows], dtype=np.int64).T
    flags = np.array([row[4:] for row in rows], dtype=np.bool_).T
    return Scores(counts[0], counts[1], counts[2], counts[3], flags[0], flags[1], flags[2])


def _score_row(
    labels: NDArray[np.int64], predictions: Predictions, mine: NDArray[np.bool_]
) -> tuple[int, int, int, int, bool, bool, bool]:
    columns = predictions.column[mine]
    correct = np.zeros(len(labels), dtype=np.bool_)
    correct[columns] = predictions.right[mine]
    close = np.zeros(len(labels), dtype=np.bool_)
    close[columns] = predictions.close[mine]
    spans = answer_spans(labels)
    right = sum(bool(correct[start:end].all()) for start, end in spans)
    # A token that is clearly wrong settles its answer, however close the others are.
    open_answers = any(bool(close[a:b].any() and (correct[a:b] | close[a:b]).all()) for a, b in spans)
    diverged = not predictions.finite[mine].all()
    return right, len(spans), int(correct.sum()), len(columns), diverged, open_answers, bool(close.any())
