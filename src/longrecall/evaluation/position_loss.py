"""Bits per byte and perplexity by position in the window, with intervals over windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.evaluation.reading import read_predictions
from longrecall.evaluation.statistics import Interval, bootstrap_ratio_interval
from longrecall.evaluation.token_bytes import tokenize_with_bytes
from longrecall.tasks.bits_per_byte import BitsPerByte


class PositionLoss:
    """The windows of one text, read once at the longest length."""

    def __init__(self, task: BitsPerByte, tokenizer: Any, lengths: list[int], samples: int) -> None:
        self.cells = task.cells(lengths)
        self.length = max(lengths)
        ids, sizes = tokenize_with_bytes(tokenizer, task.text)
        starts = task.window_starts(len(ids), self.length, samples)
        columns = starts[:, None] + np.arange(self.length)
        self.ids: NDArray[np.int64] = ids[columns]
        self.bytes: NDArray[np.int64] = sizes[columns]

    @property
    def tokens(self) -> int:
        """All tokens to read."""
        return int(self.ids.size)

    def run(
        self, model: Any, batch_tokens: int, segment_tokens: int, seed: int, advance: Callable[[int], object]
    ) -> list[dict[str, Any]]:
        """Return two result entries per range of positions: ``bits_per_byte`` and ``perplexity`` (per token).

        The first token of a window has nothing before it and counts neither in the loss nor in the bytes.
        """
        rows = max(1, batch_tokens // min(self.length, segment_tokens))
        loss = np.zeros(self.ids.shape)
        finite = np.ones(self.ids.shape, dtype=np.bool_)
        for start in range(0, len(self.ids), rows):
            block = self.ids[start : start + rows]
            read = read_predictions(model, block, block, segment_tokens)
            loss[start + read.row, read.column] = read.loss
            finite[start + read.row, read.column] = read.finite
            advance(int(block.size))
        entries: list[dict[str, Any]] = []
        for cell in self.cells:
            scored = slice(max(1, int(cell["start"])), int(cell["end"]))
            entries += _entries(cell, loss[:, scored], self.bytes[:, scored], finite[:, scored], seed)
        return entries


def _entries(
    cell: dict[str, int | float],
    loss: NDArray[np.float64],
    sizes: NDArray[np.int64],
    finite: NDArray[np.bool_],
    seed: int,
) -> list[dict[str, Any]]:
    """Return the entries of one range; `loss` in nats, all arrays [windows, positions]."""
    diverged = int((~finite.all(axis=1)).sum())
    common = {"count": int(loss.size), "sequences": len(loss), "bytes": int(sizes.sum()), "diverged": diverged}
    nats, byte_counts = loss.sum(axis=1), sizes.sum(axis=1)
    tokens = np.full(len(loss), loss.shape[1])
    bits, bits_interval = _ratio(nats / math.log(2), byte_counts, diverged, seed)
    mean, mean_interval = _ratio(nats, tokens, diverged, seed)
    return [
        {"task": "bits_per_byte", "cell": dict(cell), "metric": "bits_per_byte", "value": bits, **_ends(bits_interval)}
        | common,
        {
            "task": "bits_per_byte",
            "cell": dict(cell),
            "metric": "perplexity",
            "value": _exp(mean),
            **_ends(None if mean_interval is None else (_exp(mean_interval[0]), _exp(mean_interval[1]))),
        }
        | common,
    ]


def _ratio(
    top: NDArray[np.float64], bottom: NDArray[np.int64], diverged: int, seed: int
) -> tuple[float | None, Interval | None]:
    """Return the ratio of sums and its interval; (None, None) where a window diverged or no byte was read."""
    if diverged or not bottom.sum():
        return None, None
    return float(top.sum() / bottom.sum()), bootstrap_ratio_interval(top, bottom, seed=seed)


def _exp(value: float | None) -> float | None:
    # e^700 is near the largest double; a loss above it is reported as if it were there.
    return None if value is None else math.exp(min(value, 700.0))


def _ends(interval: tuple[float | None, float | None] | None) -> dict[str, float | None]:
    low, high = (None, None) if interval is None else interval
    return {"low": low, "high": high}
