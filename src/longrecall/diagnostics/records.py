"""Arrays as plain JSON values, exactly: what a journal keeps of a measurement that was finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_plain(values: NDArray[np.float64]) -> Any:
    """Return nested lists; None where a number is NaN or infinite, which JSON cannot say."""
    plain: NDArray[np.object_] = values.astype(object)
    plain[~np.isfinite(values)] = None
    return plain.tolist()


def from_plain(values: Any) -> NDArray[np.float64]:
    """Return what `to_plain` was given; NaN where it wrote None."""
    return np.array(values, dtype=np.float64)


def joined(parts: Sequence[Any], axis: int) -> NDArray[np.float64]:
    """Return the arrays of several records, behind each other along `axis`."""
    return np.concatenate([from_plain(part) for part in parts], axis=axis)
