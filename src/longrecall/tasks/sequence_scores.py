"""Accuracies of sequence tasks: five ways to count the same right and wrong answers, each under its own name.

All take `predictions` and `labels`, int64 of one shape [rows, T]; labels are those of the batch (already shifted), and
what is predicted where a label is -100 does not matter. All return a share in [0, 1] and raise `UserError` when the
shapes differ or nothing is labelled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import IGNORE
from longrecall.tasks.sequences import Ints

_Mask = NDArray[np.bool_]

MAD_BATCH = 128
"""Rows of a test batch in MAD's published code."""


def _right_and_asked(predictions: Ints, labels: Ints) -> tuple[_Mask, _Mask]:
    """Return bool [rows, T] each: answers that are right, and answers that are asked for."""
    if predictions.shape != labels.shape or labels.ndim != 2:
        raise UserError(
            f"predictions and labels must have one shape [rows, T], got {predictions.shape} and {labels.shape}"
        )
    asked = labels != IGNORE
    if not asked.any():
        raise UserError("no position has a label, so there is nothing to score; give rows with labels")
    return asked & (predictions == labels), asked


def token_accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the share of labelled tokens that are right: MAD's plain accuracy."""
    right, asked = _right_and_asked(predictions, labels)
    return float(right.sum() / asked.sum())


def query_accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the mean over rows of the share of a row's labels that are right; rows without labels do not count.

    The accuracy of MQAR (Arora et al. 2023, the published evaluation), where every row has as many labels as any other
    and this is `token_accuracy`.
    """
    right, asked = _right_and_asked(predictions, labels)
    counts = asked.sum(axis=1)
    return float((right.sum(axis=1)[counts > 0] / counts[counts > 0]).mean())


def whole_accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the share of rows with every label right; rows without labels do not count.

    The RESONA paper (section 4.2.1) counts an example as right only when its entire output is.
    """
    right, asked = _right_and_asked(predictions, labels)
    labelled = asked.any(axis=1)
    return float((right == asked).all(axis=1)[labelled].mean())


def macro_accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the mean over tokens of the share right among the labels that are this token: every class weighs the same.

    A token that is predicted at a labelled position but never a label counts as a class with 0 right, as in the metric
    of MAD's published code. That code takes the mean over batches (`mad_accuracy`); here all labels count at once.
    """
    right, asked = _right_and_asked(predictions, labels)
    answers, said = labels[asked], predictions[asked]
    classes, index = np.unique(np.concatenate([answers, said]), return_inverse=True)
    index = index[: len(answers)]
    counts = np.bincount(index, minlength=len(classes))
    hits = np.bincount(index[right[asked]], minlength=len(classes))
    return float((hits / np.maximum(counts, 1)).mean())


def mad_accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the accuracy that MAD's published code reports (Poli et al. 2024): `macro_accuracy` batch by batch.

    It is the mean over batches of 128 rows, in their order; a last, smaller batch counts by its rows. In a batch a
    token that is said and not asked for is a class of its own with none right, so with many classes this is lower than
    `macro_accuracy` of all rows.
    """
    _right_and_asked(predictions, labels)
    starts = range(0, len(labels), MAD_BATCH)
    batches = [(predictions[i : i + MAD_BATCH], labels[i : i + MAD_BATCH]) for i in starts]
    asked = [(said, wanted) for said, wanted in batches if (wanted != IGNORE).any()]
    rows = [len(wanted) for _, wanted in asked]
    values = [macro_accuracy(said, wanted) for said, wanted in asked]
    return float(np.average(values, weights=rows))


def shared_rows(train_ids: Ints, test_ids: Ints) -> float:
    """Return the share of test rows that are also training rows: 0 for all but tiny tasks, or rows have leaked.

    Both int64 [rows, T] of the same T; raises `UserError` when T differs.
    """
    if train_ids.ndim != 2 or test_ids.ndim != 2 or train_ids.shape[1] != test_ids.shape[1]:
        raise UserError(f"rows of one length are needed, got shapes {train_ids.shape} and {test_ids.shape}")
    known = {row.tobytes() for row in np.ascontiguousarray(train_ids, dtype=np.int64)}
    return float(np.mean([row.tobytes() in known for row in np.ascontiguousarray(test_ids, dtype=np.int64)]))
