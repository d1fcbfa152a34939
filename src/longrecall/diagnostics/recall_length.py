"""Maximum recall length: how far a model can be from a pass key and still say it, by growing length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longrecall.diagnostics.divergence import DivergenceWatch
from longrecall.diagnostics.streaming import Segment, forward, rows_at_once, segment_ends, segment_size
from longrecall.errors import UserError
from longrecall.evaluation.recall_search import THRESHOLDS, holds, maximum_lengths
from longrecall.evaluation.statistics import wilson_interval
from longrecall.tasks.encoding import IGNORE, PieceEncoder, Sample
from longrecall.tasks.passkey import Passkey

__all__ = [
    "THRESHOLDS",
    "maximum_lengths",
    "recall_length",
    "recall_lengths",
    "samples_at",
    "tokens_to_read",
]

TOKENS_PER_LENGTH = 40960
"""Short lengths get all samples, long ones as many as fit, so that no length takes much longer than another."""


def recall_lengths(task: Passkey, encode: PieceEncoder, longest: int, training_length: int) -> list[int]:
    """Return the lengths to try: doublings that end in `longest`, and training_length, from the shortest prompt on.

    Raises `UserError` when not even `longest` holds the needle and the question.
    """
    lengths = {longest >> power for power in range(longest.bit_length())} | {min(training_length, longest)}
    return sorted(length for length in lengths if length == longest or holds(task, encode, length))


def samples_at(length: int, samples: int, depths: int) -> int:
    """Return how many keys are asked at each depth: `samples` over all depths, fewer for long prompts, at least 2."""
    return max(1, min(2, samples // depths), min(samples, TOKENS_PER_LENGTH // length) // depths)


def recall_length(
    model: Any,
    tokenizer: Any,
    longest: int,
    training_length: int,
    *,
    task: Passkey | None = None,
    samples: int = 40,
    seed: int = 0,
    batch_tokens: int = 2048,
    segment_tokens: int = 256,
    advance: Callable[[int], object] = lambda tokens: None,
    watch: DivergenceWatch | None = None,
) -> dict[str, Any]:
    """Return pass key accuracy by growing length, and the maximum recall lengths.

    Stops after the first length that is not above the lowest threshold, and then tries the length half-way between it
    and the last that was: so a model that recalls nothing costs one short length.

    Args:
        model: a `RecurrentLM`.
        tokenizer: of transformers, or anything with the parts that the task uses.
        longest: tokens of the longest prompt.
        training_length: one of the lengths that are tried.
        task: None = `Passkey()`; its depths share the samples of a length.
        samples: keys per length at most; long prompts get fewer (`TOKENS_PER_LENGTH`).
        seed: of the samples; a sample depends on (seed, length, depth, index) only.
        batch_tokens: tokens that one forward pass reads at most (never less than one column).
        segment_tokens: columns read at once at most.
        advance: told the tokens read.
        watch: shown every segment; finds where the numbers stop being finite.

    Returns:
        ``{"points": [{"length", "value", "low", "high", "count"}], "maximum": {"0.5": length or None, ...}}``; accuracy
        with Wilson's 95% interval and the keys asked. A key whose logits are not finite is not recalled.

    Raises:
        UserError: `longest` is shorter than the shortest prompt, or `samples` is below 1.

    Source: the maximum recall length of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".
    """
    if samples < 1:
        raise UserError(f"recall: samples must be at least 1, got {samples}")
    task = task or Passkey()
    encode = PieceEncoder(tokenizer)

    def measure(length: int) -> dict[str, Any]:
        asked = samples_at(length, samples, len(task.depths))
        right = 0
        for cell in task.cells([length]):
            keys = [task.sample(encode, cell, index, seed) for index in range(asked)]
            right += _right(model, keys, batch_tokens, segment_tokens, advance, watch)
        count = asked * len(task.depths)
        low, high = wilson_interval(right, count)
        return {"length": length, "value": right / count, "low": low, "high": high, "count": count}

    points: list[dict[str, Any]] = []
    for length in recall_lengths(task, encode, longest, training_length):
        points.append(measure(length))
        if points[-1]["value"] <= THRESHOLDS[0]:
            between = (points[-2]["length"] + length) // 2 if len(points) > 1 else length
            if between < length and between > points[-2]["length"]:
                points.insert(-1, measure(between))
            break
    return {"points": points, "maximum": maximum_lengths(points)}


def tokens_to_read(lengths: Sequence[int], samples: int, depths: Sequence[float]) -> int:
    """Return about how many tokens `recall_length` reads when every length is recalled; what rows share counts once."""
    per_row = sum(1 - depth for depth in depths)
    return sum(int(length * (len(depths) + samples_at(length, samples, len(depths)) * per_row)) for length in lengths)


def _right(
    model: Any,
    keys: list[Sample],
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
    watch: DivergenceWatch | None,
) -> int:
    """Return how many of the keys, samples of one cell, are recalled."""
    right = 0
    group = rows_at_once(model)
    for first in range(0, len(keys), group):
        ids = np.stack([sample.input_ids for sample in keys[first : first + group]])
        labels = np.stack([sample.labels for sample in keys[first : first + group]])
        right += int(_recalled(model, ids, labels, batch_tokens, segment_tokens, advance, watch).sum())
    return right


def _recalled(
    model: Any,
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
    watch: DivergenceWatch | None,
) -> NDArray[np.bool_]:
    """Return bool ``[B]``: the argmax is right at every labelled token (greedy exact match, evaluation/scoring.py).

    What all rows begin with (everything before the needle) is read once, by one row.
    """
    asked = np.flatnonzero((labels != IGNORE).any(axis=0))
    varies = np.flatnonzero((ids != ids[0]).any(axis=0))
    # The columns that predict an answer token belong to every row.
    first, stop = int(asked[0]) - 1, int(asked[-1])
    common = min(int(varies[0]) if len(varies) else first, first)
    recalled = np.ones(len(ids), dtype=np.bool_)
    state: Any = None
    start = 0
    for part, end_of_part, rows in ((0, common, 1), (1, first, len(ids)), (2, stop, len(ids))):
        if part and state is not None and state.batch_size < rows:
            state = state.repeat_rows(rows)
        columns = segment_size(rows, int(model.config.vocab_size), batch_tokens, segment_tokens)
        ends = segment_ends(end_of_part - start, columns) if end_of_part > start else []
        for end in [start + step for step in ends]:
            block = torch.from_numpy(ids[:rows, start:end]).to(model.device)
            logits, after = forward(model, block, state, last_only=part < 2)
            if watch is not None:
                watch.see(Segment(start, end, block, None, logits, state, after))
            if part == 2:
                target = torch.from_numpy(labels[:, start + 1 : end + 1]).to(model.device)
                fine = (logits.argmax(-1) == target) & torch.isfinite(logits).all(-1)
                recalled &= (fine | (target == IGNORE)).all(1).cpu().numpy()
            advance(int(block.numel()))
            state, start = after, end
    return recalled
