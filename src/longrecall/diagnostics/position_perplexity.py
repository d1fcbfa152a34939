"""Loss by position, far past the training length, in ranges that widen with the position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from longrecall.diagnostics.records import joined, to_plain
from longrecall.diagnostics.streaming import Segment, read
from longrecall.evaluation.statistics import bootstrap_mean_interval

RANGES_PER_OCTAVE = 4
"""A range is about a fifth of its position wide: fine enough to say where a level is left, wide enough to average."""

FIRST_RANGES = 8
"""The first range ends at this part of the training length; there the context is short whatever the model."""


def position_edges(training_length: int, length: int) -> list[int]:
    """Return the ends of the ranges of positions: 0, training_length / 8, then four per octave, up to `length`.

    `training_length`, half of it and its doublings are edges, so that no range mixes what lies before and after.
    """
    edges = {0, length}
    first = max(2, training_length // FIRST_RANGES)
    step = -RANGES_PER_OCTAVE * max(0, round(math.log2(training_length / first)))
    while (edge := round(training_length * 2 ** (step / RANGES_PER_OCTAVE))) < length:
        if edge >= first:
            edges.add(edge)
        step += 1
    return sorted(edges)


class PositionLosses:
    """Sums of the loss by range and sequence: [ranges, sequences] numbers, however long the sequences.

    `edges`: ends of the ranges, as `position_edges` makes them. `sizes` int64 ``[B, T]``: bytes of each token, or None.
    The first token has nothing before it and is not scored.
    """

    def __init__(
        self, edges: Sequence[int], sequences: int, sizes: NDArray[np.int64] | None, training_length: int
    ) -> None:
        self._sizes, self._training_length = sizes, training_length
        self.ranges = list(pairwise(edges))
        shape = (len(self.ranges), sequences)
        self.nats = np.zeros(shape)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.bytes = np.zeros(shape, dtype=np.int64)

    @classmethod
    def joined(cls, edges: Sequence[int], records: Sequence[Mapping[str, Any]], training_length: int) -> PositionLosses:
        """Return the sums over the sequences of several readings, from what `record` returned of each."""
        sums = {name: joined([record[name] for record in records], axis=1) for name in ("nats", "tokens", "bytes")}
        losses = cls(edges, sums["nats"].shape[1], None, training_length)
        losses.nats = sums["nats"]
        losses.tokens, losses.bytes = (sums[name].astype(np.int64) for name in ("tokens", "bytes"))
        return losses

    def record(self) -> dict[str, Any]:
        """Return the sums as plain JSON, [ranges][sequences]."""
        return {"nats": to_plain(self.nats), "tokens": self.tokens.tolist(), "bytes": self.bytes.tolist()}

    def stops(self) -> Sequence[int]:
        """No state is looked at, so segments may end anywhere."""
        return ()

    def see(self, segment: Segment) -> None:
        """Add the losses that the segment's logits have on the tokens after them (nats, float64 sums)."""
        logits = segment.logits if segment.following is not None else segment.logits[:, :-1]
        targets = segment.ids[:, 1:]
        if segment.following is not None:
            targets = torch.cat([targets, segment.following[:, None]], dim=1)
        if not targets.shape[1]:
            return
        wide = logits.float() if logits.dtype != torch.float64 else logits
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        # A bad logit beside the target's own must not pass as a large or small loss.
        finite = torch.isfinite(wide).all(-1)
        nats: NDArray[np.float64] = torch.where(finite, losses, torch.nan).double().cpu().numpy()
        first = segment.start + 1
        for index, (start, end) in enumerate(self.ranges):
            low, high = max(start, first), min(end, first + nats.shape[1])
            if low < high:
                self.nats[index] += nats[:, low - first : high - first].sum(axis=1)
                self.tokens[index] += high - low
                if self._sizes is not None:
                    self.bytes[index] += self._sizes[:, low:high].sum(axis=1)

    def means(self) -> NDArray[np.float64]:
        """Return the mean loss in nats per token, float64 [ranges, sequences]; NaN where nothing or NaN was read."""
        return np.where(self.tokens > 0, self.nats / np.maximum(self.tokens, 1), np.nan)

    def levels(self) -> NDArray[np.float64]:
        """Return every sequence's mean loss between a quarter of the training length and the training length.

        float64 [sequences], nats per token. NaN where that is not finite or was not read.
        """
        low, high = self._training_length // 4, self._training_length
        level = [index for index, (start, end) in enumerate(self.ranges) if start >= low and end <= high]
        tokens = self.tokens[level].sum(axis=0)
        return np.where(tokens > 0, self.nats[level].sum(axis=0) / np.maximum(tokens, 1), np.nan)

    def entries(self, seed: int) -> list[dict[str, Any]]:
        """Return one entry per range: see `position_perplexity`."""
        return [self._entry(index, seed) for index in range(len(self.ranges)) if self.tokens[index].any()]

    def _entry(self, index: int, seed: int) -> dict[str, Any]:
        start, end = self.ranges[index]
        means, byte_count = self.means()[index], int(self.bytes[index].sum())
        entry: dict[str, Any] = {"start": start, "end": end, "loss": None, "perplexity": None}
        entry |= {"bits_per_token": None, "bits_per_byte": None, "low": None, "high": None, "count": len(means)}
        entry |= {"rise": None, "rise_low": None, "rise_high": None}
        if not np.isfinite(means).all():
            return entry
        loss = float(means.mean())
        interval = bootstrap_mean_interval(means, seed=seed)
        entry |= {"loss": loss, "bits_per_token": loss / math.log(2)}
        # e^700 is near the largest double; a loss above it is reported as if it were there.
        entry["perplexity"] = math.exp(min(loss, 700.0))
        if interval is not None:
            entry["low"], entry["high"] = interval
        if byte_count:
            entry["bits_per_byte"] = float(self.nats[index].sum()) / math.log(2) / byte_count
        # Each sequence against its own level: texts differ more from each other than from themselves.
        rises = means - self.levels()
        if start >= self._training_length and np.isfinite(rises).all():
            entry["rise"] = float(rises.mean())
            if (interval := bootstrap_mean_interval(rises, seed=seed)) is not None:
                entry["rise_low"], entry["rise_high"] = interval
        return entry


def position_perplexity(
    model: Any,
    ids: NDArray[np.int64],
    training_length: int,
    *,
    sizes: NDArray[np.int64] | None = None,
    columns: int = 256,
    seed: int = 0,
    advance: Callable[[int], object] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """Return the loss of `model` by position on sequences that are read from the zero state.

    Args:
        model: a `RecurrentLM`.
        ids: int64 ``[B, T]``, T at least 2.
        training_length: tokens of the sequences the model was trained on; decides the ranges (`position_edges`).
        sizes: int64 ``[B, T]``, bytes of each token; None = unknown, then there are no bits per byte.
        columns: tokens of each sequence that are read at once; memory does not depend on T.
        seed: of the bootstrap.
        advance: told the tokens read.

    Returns:
        One mapping per range of positions ``[start, end)``: "loss" (nats per token, mean over sequences), its 95%
        bootstrap interval over sequences "low" and "high" (None with one sequence), "bits_per_token", "perplexity",
        "bits_per_byte" (None without `sizes`) and "count", the sequences. Past the training length also "rise",
        "rise_low" and "rise_high": the loss above the sequence's own level (`PositionLosses.levels`). Where a logit was
        NaN or infinite the numbers are None.

    Source: the perplexity by position of "Understanding and Improving Length Generalization in Recurrent Models".
    """
    losses = PositionLosses(position_edges(training_length, ids.shape[1]), len(ids), sizes, training_length)
    read(model, ids, [losses], columns, advance)
    return losses.entries(seed)
