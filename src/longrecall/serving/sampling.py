"""The next token of several requests at once, each with its own settings and its own random numbers.

A row is treated by its own request's settings alone, and takes one random number of its own generator for each token.
So a request gets the same tokens whoever else is in the batch, but for rounding in the logits themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.inference.to_device import to_device
from longrecall.serving.options import RequestOptions

ALL = 2**31
"""More tokens than a vocabulary has."""

NOT_FINITE = -1
"""Stands for a token that cannot be told, as its logits are NaN or infinite."""


class Sampling:
    """What one request brings to the choice of its tokens."""

    def __init__(self, options: RequestOptions, prompt: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.seen: Tensor | None = None
        """bool ``[vocab]``: tokens that count as repeated; None where that makes no difference."""
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.seen[torch.tensor(list(prompt), dtype=torch.long, device=device)] = True


@dataclass(frozen=True)
class Chosen:
    """Tokens of some rows, on the model's device."""

    tokens: Tensor
    """int64 ``[n]``, in the vocabulary."""
    told: Tensor
    """The same, or `NOT_FINITE`."""
    told_rows: list[int]
    """The rows whose log probabilities were asked for."""
    logprobs: Tensor | None
    """float32 ``[m]`` of the tokens of those rows."""
    top: tuple[Tensor, Tensor] | None
    """Log probabilities and ids ``[m, k]`` of the likeliest tokens there, the likeliest first."""


class Chooser:
    """Chooses for a fixed list of requests, one a row; None = nobody is there. It changes their `seen`.

    It goes on choosing for requests that have ended, for nobody: a new one would be made at every end.
    """

    def __init__(self, rows: Sequence[Sampling | None], device: torch.device) -> None:
        self.device, self.size = device, len(rows)
        present = [(row, sampling) for row, sampling in enumerate(rows) if sampling is not None]
        self.penal = [(row, each) for row, each in present if each.seen is not None]
        self.penal_rows, self.penalty, self.seen = self._gathered()
        self.free = _Group([(r, s) for r, s in present if s.options.samples and not s.options.filters], device)
        self.filtered = _Group([(r, s) for r, s in present if s.options.filters], device)
        told = [(row, each.options.logprobs) for row, each in present if each.options.logprobs is not None]
        self.told_rows = [row for row, _ in told]
        self.told_index = to_device(self.told_rows, device)
        self.alternatives = max((count or 0 for _, count in told), default=0)

    def _gathered(self) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = to_device([row for row, _ in self.penal], self.device)
        penalty = to_device([each.options.repetition_penalty for _, each in self.penal], self.device, torch.float32)
        if not self.penal:
            return rows, penalty, None
        seen = torch.stack([each.seen for _, each in self.penal if each.seen is not None])
        for place, (_, each) in enumerate(self.penal):
            each.seen = seen[place]
        return rows, penalty[:, None], seen

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Chosen:
        """Logits ``[n, vocab]``, n at least `size` -> a token for each."""
        scores = self._penalised(logits)
        largest, tokens = scores.max(-1)
        for group, choose in ((self.free, _of_all), (self.filtered, _of_some)):
            if group.samplings:
                found = choose(scores.index_select(0, group.rows).float() / group.temperature, group)
                tokens.index_copy_(0, group.rows, found)
        if self.seen is not None:
            self.seen.scatter_(1, tokens.index_select(0, self.penal_rows)[:, None], True)
        if self.seen is not None:
            largest = logits.amax(-1)
        # A NaN anywhere in a row is its maximum, and not less than anything.
        told = torch.where(largest.abs() < torch.inf, tokens, NOT_FINITE)
        logprobs, top = None, None
        if self.told_rows:
            table = logits.index_select(0, self.told_index).float().log_softmax(-1)
            logprobs = table.gather(1, tokens.index_select(0, self.told_index)[:, None])[:, 0]
            if self.alternatives:
                found_top = table.topk(min(self.alternatives, table.shape[1]), dim=-1)
                top = found_top.values, found_top.indices
        return Chosen(tokens, told, self.told_rows, logprobs, top)

    def _penalised(self, logits: Tensor) -> Tensor:
        if self.seen is None:
            return logits
        own = logits.index_select(0, self.penal_rows).float()
        changed = torch.where(own < 0, own * self.penalty, own / self.penalty)
        return logits.float().index_copy(0, self.penal_rows, torch.where(self.seen, changed, own))


class _Group:
    """Rows that are sampled in one way."""

    def __init__(self, found: list[tuple[int, Sampling]], device: torch.device) -> None:
        self.samplings = [sampling for _, sampling in found]
        options = [sampling.options for sampling in self.samplings]
        self.device = device
        self.rows = to_device([row for row, _ in found], device)
        self.temperature = self._column([each.temperature or 1.0 for each in options])
        self.top_k = self._column([min(each.top_k or ALL, ALL) for each in options])
        self.top_p = self._column([each.top_p for each in options])
        self.min_p = self._column([each.min_p for each in options])

    def _column(self, values: Sequence[float]) -> Tensor:
        return to_device(values, self.device, torch.float32)[:, None]

    def draw(self) -> Tensor:
        """A number from 0 to 1 for each row ``[n, 1]``."""
        return to_device([each.random.random() for each in self.samplings], self.device, torch.float32)[:, None]


def _of_all(scores: Tensor, group: _Group) -> Tensor:
    """Sample ``[n]`` from softmax of scores ``[n, vocab]``."""
    return _drawn(scores.softmax(-1), group)


def _of_some(scores: Tensor, group: _Group) -> Tensor:
    """The same from the tokens that top-k, top-p and min-p leave, in that order."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    probabilities = ordered.masked_fill(rank >= group.top_k, -torch.inf).softmax(-1)
    # Those that come before already sum up to top-p; the first one always stays.
    before = probabilities.cumsum(-1) - probabilities
    out = (before >= group.top_p) | (probabilities < group.min_p * probabilities[:, :1])
    out[:, 0] = False
    return ids.gather(1, _drawn(probabilities.masked_fill(out, 0.0), group)[:, None])[:, 0]


def _drawn(weights: Tensor, group: _Group) -> Tensor:
    """The column ``[n]`` of each row in which the sum of its weights passes a random part of the whole."""
    sums = weights.cumsum(-1)
    # Less than the whole, also when the product is rounded up to it: the column then has a weight.
    wanted = torch.minimum(group.draw() * sums[:, -1:], sums[:, -1:] * (1 - 2**-23))
    return torch.searchsorted(sums, wanted, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
