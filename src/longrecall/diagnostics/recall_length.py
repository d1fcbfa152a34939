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
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, Sample
from longrecall.tasks.passkey import Passkey

__all__ = [
    "THRESHOLDS",
    "key_groups",
    "maximum_lengths",
    "recall_length",
    "recall_lengths",
    "recalled_keys",
    "samples_at",
    "search_lengths",
    "tokens_of",
]

TOKENS_PER_LENGTH = 40960
"""Short lengths get all samples, long ones as many as fit, so that no length takes much longer than another."""

DOUBLINGS = 3
"""How often the keys of a length are doubled at most: 8 times the first ones tell 0.5 from 0.36 with 80 keys."""

Ask = Callable[[Cell, range], Sequence[bool]]
"""Asks for keys (the indexes of samples) of a cell of the task and says which are recalled."""


def recall_lengths(task: Passkey, encode: PieceEncoder, longest: int, training_length: int) -> list[int]:
    """Return the lengths to try: doublings that end in `longest`, and training_length, from the shortest prompt on.

    Raises `UserError` when not even `longest` holds the needle and the question.
    """
    lengths = {longest >> power for power in range(longest.bit_length())} | {min(training_length, longest)}
    return sorted(length for length in lengths if length == longest or holds(task, encode, length))


def samples_at(length: int, samples: int, depths: int) -> int:
    """Return how many keys are asked first at each depth: `samples` over all depths, fewer for long prompts.

    At least 2, or what `samples` allows.
    """
    return max(1, min(2, samples // depths), min(samples, TOKENS_PER_LENGTH // length) // depths)


def recall_length(
    model: Any,
    tokenizer: Any,
    longest: int,
    training_length: int,
    *,
    task: Passkey | None = None,
    samples: int = 40,
    doublings: int = DOUBLINGS,
    seed: int = 0,
    batch_tokens: int = 2048,
    segment_tokens: int = 256,
    advance: Callable[[int], object] = lambda tokens: None,
    watch: DivergenceWatch | None = None,
) -> dict[str, Any]:
    """Return pass key accuracy by growing length, and the maximum recall lengths.

    Args:
        model: a `RecurrentLM`.
        tokenizer: of transformers, or anything with the parts that the task uses.
        longest: tokens of the longest prompt.
        training_length: one of the lengths that are tried.
        task: None = `Passkey()`; its depths share the samples of a length.
        samples: keys per length at first, at most; long prompts get fewer (`TOKENS_PER_LENGTH`).
        doublings: how often as many keys again are asked, at most, where those asked do not tell whether accuracy is
            above the lowest threshold.
        seed: of the samples; a sample depends on (seed, length, depth, index) only.
        batch_tokens: tokens that one forward pass reads at most (never less than one column).
        segment_tokens: columns read at once at most.
        advance: told the tokens read.
        watch: shown every segment; finds where the numbers stop being finite.

    Returns:
        As `search_lengths` does. A key whose logits are not finite is not recalled.

    Raises:
        UserError: `longest` is shorter than the shortest prompt, `samples` is below 1 or `doublings` below 0.

    Source: the maximum recall length of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".
    """
    task = task or Passkey()
    encode = PieceEncoder(tokenizer)

    def ask(cell: Cell, indexes: range) -> list[bool]:
        recalled: list[bool] = []
        for group in key_groups(model, indexes):
            keys = [task.sample(encode, cell, index, seed) for index in group]
            recalled += recalled_keys(model, keys, batch_tokens, segment_tokens, advance, watch)
        return recalled

    lengths = recall_lengths(task, encode, longest, training_length)
    return search_lengths(task, lengths, samples, doublings, ask)


def search_lengths(task: Passkey, lengths: Sequence[int], samples: int, doublings: int, ask: Ask) -> dict[str, Any]:
    """Return accuracy at growing `lengths` and the maximum recall lengths; `ask` does the work.

    A length gets more keys until its interval lies on one side of the lowest threshold, within `doublings`. The search
    stops after the first length that is surely not above it, so a model that recalls nothing costs one short length;
    where the length before is surely above, the one half-way between them is tried too.

    Returns:
        ``{"points": [{"length", "value", "low", "high", "count"}], "maximum": {"0.5": length or None, ...},
        "maximum_intervals": {"0.5": [low, high], ...}}``; accuracy with Wilson's interval and the keys asked.
        Intervals are widened so that they hold for all looks at a length together with 95%. The interval of a maximum
        goes from what it is with every length at its low end to what it is with every length at its high end, and no
        further than the last length that was asked.

    Raises:
        UserError: `samples` is below 1 or `doublings` below 0.
    """
    if samples < 1:
        raise UserError(f"recall: samples must be at least 1, got {samples}")
    if doublings < 0:
        raise UserError(f"recall: doublings must be at least 0, got {doublings}")
    # One in twenty over all looks, not at each: whoever looks often and stops when it suits is wrong more often.
    level = 1 - 0.05 / (doublings + 1)

    def measure(length: int) -> dict[str, Any]:
        cells = task.cells([length])
        asked, first = 0, samples_at(length, samples, len(cells))
        right = 0
        for look in range(doublings + 1):
            more = range(asked, first << look)
            right += sum(sum(ask(cell, more)) for cell in cells)
            asked = first << look
            count = asked * len(cells)
            low, high = wilson_interval(right, count, level)
            if low > THRESHOLDS[0] or high <= THRESHOLDS[0]:
                break
        return {"length": length, "value": right / count, "low": low, "high": high, "count": count}

    points: list[dict[str, Any]] = []
    for length in lengths:
        points.append(measure(length))
        if points[-1]["high"] > THRESHOLDS[0]:
            continue
        if len(points) > 1 and points[-2]["low"] > THRESHOLDS[0]:
            between = (points[-2]["length"] + length) // 2
            if points[-2]["length"] < between < length:
                points.insert(-1, measure(between))
        break
    ends = [maximum_lengths([{**point, "value": point[end]} for point in points]) for end in ("low", "high")]
    return {
        "points": points,
        "maximum": maximum_lengths(points),
        "maximum_intervals": {name: [end[name] for end in ends] for name in ends[0]},
    }


def key_groups(model: Any, indexes: range) -> list[range]:
    """Return the keys of a cell in the groups that are read together."""
    size = rows_at_once(model)
    return [indexes[first : first + size] for first in range(0, len(indexes), size)]


def tokens_of(cell: Cell, keys: int) -> int:
    """Return about how many tokens are read for so many keys of a cell; what the rows share counts once."""
    length, depth = float(cell["length"]), float(cell["depth"])
    return int(length * (depth + keys * (1 - depth)))


def recalled_keys(
    model: Any,
    keys: Sequence[Sample],
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
    watch: DivergenceWatch | None,
) -> list[bool]:
    """Return which of the keys, samples of one cell that are read together, are recalled."""
    ids = np.stack([sample.input_ids for sample in keys])
    labels = np.stack([sample.labels for sample in keys])
    return [bool(key) for key in _recalled(model, ids, labels, batch_tokens, segment_tokens, advance, watch)]


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
