"""Which pairs of a row have the same key: shared by the recall tasks of MAD."""

from __future__ import annotations

import numpy as np

from longrecall.tasks.sequences import Ints

CHUNK = 1024
"""Rows drawn at a time: bounds the memory of a large data set."""


def first_occurrence(codes: Ints) -> Ints:
    """Return int64 [rows, P]: for each entry of `codes` [rows, P] the index of the first equal one in its row."""
    order = np.argsort(codes, axis=1, kind="stable")
    ranked = np.take_along_axis(codes, order, axis=1)
    begins = np.ones(codes.shape, dtype=bool)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    # The sort is stable, so a group of equal codes begins with the one that stands first in the row.
    group = np.maximum.accumulate(np.where(begins, np.arange(codes.shape[1]), 0), axis=1)
    first = np.empty(codes.shape, dtype=np.int64)
    np.put_along_axis(first, order, np.take_along_axis(order, group, axis=1), axis=1)
    return first
