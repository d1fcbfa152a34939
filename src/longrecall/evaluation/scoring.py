"""Scoring answers: one forward pass instead of one generation per answer.

An answer is right iff, with the true answer fed in, the argmax is right at every one of its tokens. That equals exact
match of greedy decoding: greedy decoding emits the argmax given its own tokens so far, and as long as these are right
they are the true ones. At the first wrong argmax both notions fail. So the two agree answer by answer (up to ties and
rounding between two ways to compute one logit).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from longrecall.evaluation.reading import Predictions
from longrecall.tasks.encoding import answer_spans


def score_answers(
    labels: list[NDArray[np.int64]], predictions: Predictions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (right answers, answers, diverged) of each sequence, [sequences] each.

    `labels`: the labels of each row, unpadded. A sequence diverged when a scored logit was not finite; an answer with
    such a logit is wrong.
    """
    right = np.zeros(len(labels), dtype=np.int64)
    asked = np.zeros(len(labels), dtype=np.int64)
    diverged = np.zeros(len(labels), dtype=np.bool_)
    for row, row_labels in enumerate(labels):
        mine = predictions.row == row
        correct = np.zeros(len(row_labels), dtype=np.bool_)
        correct[predictions.column[mine]] = predictions.right[mine]
        spans = answer_spans(row_labels)
        asked[row] = len(spans)
        right[row] = sum(bool(correct[start:end].all()) for start, end in spans)
        diverged[row] = not predictions.finite[mine].all()
    return right, asked, diverged


def score_tokens(
    labels: list[NDArray[np.int64]], predictions: Predictions
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (right tokens, labelled tokens) of each sequence, [sequences] each; arguments as of `score_answers`."""
    right = np.bincount(predictions.row[predictions.right], minlength=len(labels)).astype(np.int64)
    asked = np.bincount(predictions.row, minlength=len(labels)).astype(np.int64)
    return right, asked
