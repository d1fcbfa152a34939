"""Bits per byte and perplexity by position in the window, with intervals over windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.evaluation.memory import Room
from longrecall.evaluation.outcomes import pack_scores
from longrecall.evaluation.reading import read_predictions
from longrecall.evaluation.statistics import Interval, bootstrap_ratio_interval
from longrecall.evaluation.token_bytes import tokenize_with_bytes
from longrecall.tasks.encoding import cell_key
from longrecall.tasks.registry import PositionTask


class PositionLoss:
    """The windows of one text, read once at the longest length."""

    def __init__(
        self,
        model: Any,
        task: PositionTask,
        tokenizer: Any,
        lengths: list[int],
        samples: int,
        seed: int,
        room: Room,
    ) -> None:
        self.task, self.cells = task.name, task.cells(lengths)
        self.tokens = max(lengths)
        self.key = cell_key(task.name, {"length": self.tokens})
        ids, sizes = tokenize_with_bytes(tokenizer, task.text)
        starts = task.window_starts(len(ids), self.tokens, samples)
        columns = starts[:, None] + np.arange(self.tokens)
        self.ids: NDArray[np.int64] = ids[columns]
        self.bytes: NDArray[np.int64] = sizes[columns]
        self.count = len(self.ids)
        self.align = room.rows(self.tokens, self.tokens)
        self._model, self._seed, self._room = model, seed, room

    def run(self, indexes: Sequence[int], advance: Callable[[int], object]) -> Iterator[dict[int, dict[str, Any]]]:
        """Read these windows; yield ``{"nats", "finite"}`` of each, a number per range, batch by batch.

        A batch is always `align` windows from a multiple of it on, also where only some of them are asked for: a loss
        depends a little on the batch, and should not depend on where an earlier run was interrupted.
        """
        for block in sorted({index // self.align for index in indexes}):
            windows = list(range(block * self.align, min(self.count, (block + 1) * self.align)))
            found = self._room.run(windows, self._read, self.tokens)
            yield dict(zip(windows, found, strict=True))
            advance(len(windows) * self.tokens)

    def _read(self, windows: list[int]) -> list[dict[str, Any]]:
        block = self.ids[windows]
        read = read_predictions(self._model, block, block, self._room.segment_tokens, margins=False)
        loss = np.zeros(block.shape)
        finite = np.ones(block.shape, dtype=np.bool_)
        loss[read.row, read.column] = read.loss
        finite[read.row, read.column] = read.finite
        whole = np.stack([finite[:, _scored(cell)].all(axis=1) for cell in self.cells], axis=1)
        nats = np.stack([loss[:, _scored(cell)].sum(axis=1) for cell in self.cells], axis=1)
        nats[~whole] = 0.0
        return [{"nats": a, "finite": b} for a, b in zip(nats.tolist(), whole.tolist(), strict=True)]

    def entries(self, records: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Return two result entries per range of positions: ``bits_per_byte`` and ``perplexity`` (per token).

        The first token of a window has nothing before it and counts neither in the loss nor in the bytes.
        """
        nats = np.array([records[index]["nats"] for index in range(self.count)])
        finite = np.array([records[index]["finite"] for index in range(self.count)])
        entries: list[dict[str, Any]] = []
        for place, cell in enumerate(self.cells):
            sizes = self.bytes[:, _scored(cell)]
            entries += _entries(self.task, cell, nats[:, place], sizes, finite[:, place], self._seed)
        return entries


def _scored(cell: Mapping[str, int | float]) -> slice:
    return slice(max(1, int(cell["start"])), int(cell["end"]))


def _entries(
    task: str,
    cell: Mapping[str, int | float],
    nats: NDArray[np.float64],
    sizes: NDArray[np.int64],
    finite: NDArray[np.bool_],
    seed: int,
) -> list[dict[str, Any]]:
    """Return the entries of one range; `sizes` [windows, positions] in bytes, `nats` and `finite` [windows]."""
    diverged = int((~finite).sum())
    windows, positions = sizes.shape
    byte_counts = sizes.sum(axis=1)
    common = {
        "count": windows * positions,
        "sequences": windows,
        "bytes": int(byte_counts.sum()),
        "diverged": diverged,
    }
    tokens = np.full(windows, positions)
    bits, bits_interval = _ratio(nats / math.log(2), byte_counts, diverged, seed)
    mean, mean_interval = _ratio(nats, tokens, diverged, seed)
    # Of the two metrics one is enough to compare files by: perplexity is the same loss on another scale.
    outcomes = None if diverged else pack_scores(nats / math.log(2), byte_counts)
    return [
        {"task": task, "cell": dict(cell), "metric": "bits_per_byte", "value": bits, **_ends(bits_interval)}
        | common
        | ({} if outcomes is None else {"outcomes": outcomes}),
        {
            "task": task,
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
