"""Running one cell of a recall task: samples, batches, answers, interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from longrecall.evaluation.reading import pad_right, read_predictions
from longrecall.evaluation.scoring import score_answers
from longrecall.evaluation.statistics import clustered_wilson_interval
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, Sample
from longrecall.tasks.registry import RecallTask


def sequences_needed(task: RecallTask, cell: Cell, samples: int) -> int:
    """Return how many sequences give at least `samples` answers."""
    return -(-samples // task.answers_per_sample(cell))


def run_cell(
    model: Any,
    encode: PieceEncoder,
    task: RecallTask,
    cell: Cell,
    samples: int,
    seed: int,
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """Return the result entry of one cell: accuracy over answers, with an interval that knows about sequences.

    An answer whose logits are not finite is wrong; `diverged` counts the sequences with such logits.
    """
    sequences = sequences_needed(task, cell, samples)
    produced = (task.sample(encode, cell, index, seed) for index in range(sequences))
    right, asked, diverged = [], [], 0
    for batch in _batches(produced, batch_tokens, segment_tokens):
        labels = [sample.labels for sample in batch]
        ids = pad_right([sample.input_ids for sample in batch], 0)
        read = read_predictions(model, ids, pad_right(labels, IGNORE), segment_tokens)
        batch_right, batch_asked, batch_diverged = score_answers(labels, read)
        right.append(batch_right)
        asked.append(batch_asked)
        diverged += int(batch_diverged.sum())
        advance(sum(len(sample.input_ids) for sample in batch))
    all_right, all_asked = np.concatenate(right), np.concatenate(asked)
    low, high = clustered_wilson_interval(all_right, all_asked)
    return {
        "task": task.name,
        "cell": dict(cell),
        "metric": "accuracy",
        "value": float(all_right.sum() / all_asked.sum()),
        "count": int(all_asked.sum()),
        "low": low,
        "high": high,
        "sequences": sequences,
        "diverged": diverged,
    }


def _batches(samples: Iterator[Sample], batch_tokens: int, segment_tokens: int) -> Iterator[list[Sample]]:
    """Group samples so that one segment of all rows has at most `batch_tokens` tokens (and at least one row)."""
    batch: list[Sample] = []
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample.input_ids))
        if batch and (len(batch) + 1) * min(longest, segment_tokens) > batch_tokens:
            yield batch
            batch, longest = [], len(sample.input_ids)
        batch.append(sample)
    if batch:
        yield batch
