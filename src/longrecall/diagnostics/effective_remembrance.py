"""Effective remembrance: how much the next-token prediction changes when the first t tokens are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrecall.diagnostics.divergence import DivergenceWatch
from longrecall.diagnostics.streaming import Segment, forward, rows_at_once, segment_ends, segment_size
from longrecall.errors import UserError
from longrecall.evaluation.statistics import bootstrap_mean_interval
from longrecall.layers.stepping.cache import PADDING_POSITION
from longrecall.layers.tokens import NO_TOKEN
from longrecall.models.state import RecurrentState


def default_starts(length: int) -> list[int]:
    """Return the grid of t for sequences of `length` tokens: 0, a few early ones, and then towards the end.

    Early t show whether the first tokens weigh too much, late ones how far back the model looks. The work is the sum of
    `length` - t over the grid, about 4.5 times `length`.
    """
    early = {0, length // 64, length // 8, length // 4}
    late = {length - length // 2**power for power in range(1, length.bit_length())}
    return sorted(t for t in early | late if 0 <= t < length)


def check_starts(starts: Sequence[int], length: int) -> list[int]:
    """Return the grid sorted and without repetition; raise `UserError` when empty or outside 0..length - 1."""
    for t in starts:
        if not 0 <= t < length:
            raise UserError(
                f"remembrance: t = {t} is outside the sequence; it counts the tokens left out, 0 to {length - 1}"
            )
    if not starts:
        raise UserError("remembrance: give at least one t, for example --starts 0,128,256")
    return sorted(set(starts))


def total_variation(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return half the L1 distance of two softmax distributions ``[..., vocab]`` as float64 ``[...]``, in [0, 1]."""
    p, q = (torch.softmax(logits.double(), dim=-1) for logits in (p_logits, q_logits))
    return (p - q).abs().sum(-1) / 2


def effective_remembrance(
    model: Any,
    ids: NDArray[np.int64],
    starts: Sequence[int] | None = None,
    *,
    batch_tokens: int = 2048,
    segment_tokens: int = 256,
    seed: int = 0,
    advance: Callable[[int], object] = lambda tokens: None,
    watch: DivergenceWatch | None = None,
) -> dict[str, Any]:
    """Return EffRem_T(t) = TV(q(. | x[0:T]), q(. | x[t:T])) over a grid of t, averaged over sequences.

    All t are read together: at column t a row that starts from the zero state joins the batch, so the work is exactly
    the sum of T - t and nothing is padded; memory is one state per sequence and t.

    Args:
        model: a `RecurrentLM`.
        ids: int64 ``[B, T]``.
        starts: the grid of t, each in 0..T - 1; None = `default_starts`. EffRem is 0 at t = 0 by definition.
        batch_tokens: tokens that one forward pass reads at most (never less than one column).
        segment_tokens: columns read at once at most.
        seed: of the bootstrap.
        advance: told the tokens read.
        watch: shown every segment; finds where the numbers stop being finite.

    Returns:
        ``{"length": T, "points": [{"t", "value", "low", "high", "count"}]}``: mean, 95% bootstrap interval over
        sequences (None with one) and the sequences. None where the prediction is not finite.

    Raises:
        UserError: an empty grid or a t outside 0..T - 1.

    Source: "Understanding and Improving Length Generalization in Recurrent Models", effective remembrance.
    """
    length = ids.shape[1]
    grid = check_starts(default_starts(length) if starts is None else starts, length)
    group = rows_at_once(model, copies=len(grid) + 1)
    changes = [
        prediction_changes(model, ids[first : first + group], grid, batch_tokens, segment_tokens, advance, watch)
        for first in range(0, len(ids), group)
    ]
    return remembrance_entries(length, grid, np.concatenate(changes, axis=1), seed)


def prediction_changes(
    model: Any,
    ids: NDArray[np.int64],
    grid: list[int],
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
    watch: DivergenceWatch | None,
) -> NDArray[np.float64]:
    """Return the total variation at each t of `grid` (ascending) for each sequence of `ids`: float64 [t, sequences]."""
    whole, *cut = _last_logits(model, ids, grid, batch_tokens, segment_tokens, advance, watch)
    return np.stack([total_variation(whole, logits).cpu().numpy() for logits in cut])


def remembrance_entries(length: int, grid: Sequence[int], changes: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """Return what `effective_remembrance` returns, from the changes of all sequences, float64 [t, sequences]."""
    points = []
    for t, values in zip(grid, changes, strict=True):
        finite = bool(np.isfinite(values).all())
        interval = bootstrap_mean_interval(values, seed=seed) if finite else None
        low, high = interval or (None, None)
        value = float(values.mean()) if finite else None
        points.append({"t": t, "value": value, "low": low, "high": high, "count": len(values)})
    return {"length": length, "points": points}


def tokens_to_read(rows: int, length: int, starts: Sequence[int]) -> int:
    """Return the tokens that `effective_remembrance` reads for `rows` sequences."""
    return rows * sum(length - t for t in (0, *[t for t in starts if t]))


def _last_logits(
    model: Any,
    ids: NDArray[np.int64],
    grid: list[int],
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
    watch: DivergenceWatch | None,
) -> list[Tensor]:
    """Return the last logits ``[B, vocab]`` of the whole sequences and then of each start of the grid."""
    rows, length = ids.shape
    joining = [t for t in grid if t]
    state: Any = None
    active, start = 1, 0
    logits = torch.empty(0)
    for stop in [*joining, length]:
        columns = segment_size(rows * active, int(model.config.vocab_size), batch_tokens, segment_tokens)
        for end in [start + step for step in segment_ends(stop - start, columns)]:
            block = torch.from_numpy(ids[:, start:end]).to(model.device).repeat(active, 1)
            logits, after = forward(model, block, state, last_only=True)
            if watch is not None:
                watch.see(Segment(start, end, block, None, logits, state, after))
            advance(int(block.numel()))
            state, start = after, end
        if stop < length:
            state, active = join_rows(state, rows), active + 1
    by_start = dict(zip([0, *joining], logits[:, -1].split(rows), strict=True))
    return [by_start[0], *(by_start[t] for t in grid)]


def join_rows(state: RecurrentState, count: int) -> RecurrentState:
    """Return a state with `count` more rows that have read nothing: zeros, and padding in attention's cache."""

    def more(name: str, old: Tensor) -> Tensor:
        fill = PADDING_POSITION if name.rpartition(".")[2] == "position" else 0
        return torch.cat([old, old.new_full((count, *old.shape[1:]), fill)])

    layers = tuple({name: more(name, tensor) for name, tensor in layer.items()} for layer in state.layers)
    position = torch.cat([state.position, state.position.new_zeros(count)])
    context = state.context
    if context is not None:
        context = torch.cat([context, context.new_full((count, context.shape[1]), NO_TOKEN)])
    return RecurrentState(layers, position, state.length, context)
