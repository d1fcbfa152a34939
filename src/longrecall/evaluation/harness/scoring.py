"""What the harness asks of a model, on tokens: log-likelihoods and greedy text, in batches that change no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longrecall.evaluation.memory import Room
from longrecall.evaluation.reading import (
    Ints,
    Predictions,
    has_state_value,
    pad_right,
    read_continuations,
    read_predictions,
    read_prompts,
)
from longrecall.tasks.encoding import IGNORE


@dataclass(frozen=True)
class Likelihoods:
    """Continuations of one document that are weighed against each other.

    `pairs`: (tokens before, tokens of the continuation) of each, at least one token before. `sizes` float64
    [measures, pairs]: what a log-likelihood may be divided by before it is compared: 1, characters, bytes. `exact`:
    whether a choice hangs on them; if not, nothing is ever too close to call.
    """

    pairs: tuple[tuple[Ints, Ints], ...]
    sizes: NDArray[np.float64]
    exact: bool = True

    @property
    def own(self) -> int:
        """Tokens of the longest row."""
        return max((len(before) + len(after) for before, after in self.pairs), default=0)

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return len(self.pairs)


@dataclass(frozen=True)
class Prompt:
    """A prompt to go on from, greedily: at most `new_tokens`, until `ended(tokens so far)`."""

    tokens: Ints
    new_tokens: int
    ended: Callable[[list[int]], bool]

    @property
    def own(self) -> int:
        """Tokens to read and to say."""
        return len(self.tokens) + self.new_tokens

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return 1


Work = Likelihoods | Prompt

_TRIED = 16
"""After so many items, more than half of them too close to call, the others are read alone at once."""


class Scorer:
    """Answers work on tokens.

    `most_rows`: rows of a batch at most; None leaves it to `room`. What rounding could decide in a batch is read again
    alone, so choices, greedy flags and texts are the same for every batch size; log-likelihoods differ by rounding.
    """

    def __init__(self, model: Any, room: Room, end_token: int | None, most_rows: int | None = None) -> None:
        self._model, self._room, self._end, self._most = model, room, end_token, most_rows
        self._tried = self._close = 0

    def run(self, work: Sequence[Work]) -> Iterator[dict[int, list[Any]]]:
        """Yield, batch by batch, index -> answers: of likelihoods ``(sum, is greedy)`` each, of a prompt its tokens.

        An answer from a logit that is not finite is None.
        """
        readers: tuple[tuple[type[Any], Callable[[Sequence[Any], bool], list[list[Any] | None]]], ...] = (
            (Likelihoods, self._likelihoods),
            (Prompt, self._continuations),
        )
        for kind, read in readers:
            self._tried = self._close = 0
            mine = [index for index, item in enumerate(work) if isinstance(item, kind)]
            waiting = sorted(mine, key=lambda index: (-work[index].own, self._company(work[index])))
            while waiting:
                taken = self._take([work[index] for index in waiting])
                batch, waiting = waiting[:taken], waiting[taken:]
                yield dict(zip(batch, self._batch([work[index] for index in batch], read), strict=True))

    def _company(self, item: Work) -> int:
        """Return what items must have in common to be read together."""
        # Without padding on the left only prompts of one length can be.
        return 0 if has_state_value(self._model) or isinstance(item, Likelihoods) else len(item.tokens)

    def _take(self, waiting: Sequence[Work]) -> int:
        """Return how many of the waiting, the longest first, make a batch."""
        if self._tried >= _TRIED and 2 * self._close > self._tried:
            return 1
        first = waiting[0]
        rows = self._room.rows(first.own, first.own)
        rows = rows if self._most is None else min(rows, self._most)
        taken, used = 1, first.rows
        for item in waiting[1:]:
            used += item.rows
            if used > rows or self._company(item) != self._company(first):
                break
            taken += 1
        return taken

    def _batch(self, items: list[Any], read: Callable[[Sequence[Any], bool], list[list[Any] | None]]) -> list[Any]:
        found: list[Any] = [None] * len(items)
        if len(items) > 1:
            found = self._room.run(items, lambda part: read(part, False), max(item.own * item.rows for item in items))
            self._tried += len(found)
            self._close += found.count(None)
        return [
            self._room.run([item], lambda part: read(part, True), item.own * item.rows)[0] if answer is None else answer
            for item, answer in zip(items, found, strict=True)
        ]

    def _likelihoods(self, items: Sequence[Likelihoods], alone: bool) -> list[list[Any] | None]:
        read = self._read_pairs(items, alone, margins=any(item.exact for item in items))
        count = sum(item.rows for item in items)
        total: NDArray[np.float64] = -np.bincount(read.row, weights=read.loss, minlength=count).astype(np.float64)
        wrong = np.bincount(read.row, weights=~read.right, minlength=count)
        broken = np.bincount(read.row, weights=~read.finite, minlength=count) > 0
        # A token that is clearly wrong settles the greedy flag, however close the others are.
        settled = np.bincount(read.row, weights=~read.right & ~read.close, minlength=count) > 0
        near = (np.bincount(read.row, weights=read.close, minlength=count) > 0) & ~settled
        # Rounding moves a loss, a mean over the vocabulary, less than the one logit that it moves most.
        doubt = np.bincount(read.row, weights=np.nan_to_num(read.doubt), minlength=count) / 4
        answers: list[list[Any] | None] = []
        start = 0
        for item in items:
            mine = slice(start, start + item.rows)
            start = mine.stop
            if not alone and item.exact and (near[mine].any() or _is_close(total[mine], doubt[mine], item.sizes)):
                answers.append(None)
                continue
            answers.append(
                [
                    None if bad else (float(value), not misses)
                    for value, misses, bad in zip(total[mine], wrong[mine].tolist(), broken[mine], strict=True)
                ]
            )
        return answers

    def _read_pairs(self, items: Sequence[Likelihoods], alone: bool, margins: bool) -> Predictions:
        """Read every pair; texts before several continuations of one document are read once."""
        segment = self._room.alone_tokens if alone else self._room.segment_tokens
        pairs = [pair for item in items for pair in item.pairs]
        state = None
        if has_state_value(self._model):
            state = self._after_contexts(items, segment)
            # The last token predicts the first of the continuation, so it is read with it.
            pairs = [(before[-1:], after) for before, after in pairs]
        ids = [np.concatenate((before, after)) for before, after in pairs]
        labels = [np.concatenate((np.full(len(before), IGNORE, dtype=np.int64), after)) for before, after in pairs]
        return read_predictions(
            self._model, pad_right(ids, 0), pad_right(labels, IGNORE), segment, state, margins=margins
        )

    def _after_contexts(self, items: Sequence[Likelihoods], segment: int) -> Any:
        """Return the state before the last token of each pair's first part, a row for each pair."""
        contexts: list[Ints] = []
        row: list[int] = []
        for item in items:
            place: dict[bytes, int] = {}
            for before, _ in item.pairs:
                key = before[:-1].tobytes()
                if key not in place:
                    place[key] = len(contexts)
                    contexts.append(before[:-1])
                row.append(place[key])
        if not any(len(context) for context in contexts):
            return self._model.zero_state(len(row))
        state = read_prompts(self._model, contexts, segment)[1]
        return state.select_rows(torch.tensor(row, device=self._model.device))

    def _continuations(self, items: Sequence[Prompt], alone: bool) -> list[list[Any] | None]:
        def ended(row: int, tokens: list[int]) -> bool:
            return len(tokens) >= items[row].new_tokens or items[row].ended(tokens)

        found = read_continuations(
            self._model,
            [item.tokens for item in items],
            max(item.new_tokens for item in items),
            self._room.alone_tokens if alone else self._room.segment_tokens,
            ended,
            end_token=self._end,
            decide=alone,
        )
        return [None if said.close else [said.tokens if said.finite else None] for said in found]


def _is_close(total: NDArray[np.float64], doubt: NDArray[np.float64], sizes: NDArray[np.float64]) -> bool:
    """Return whether rounding could change which of several log-likelihoods is the highest, by any measure."""
    if len(total) < 2:
        return False
    for measure in sizes:
        value, range_ = total / measure, doubt / measure
        best, second = np.argsort(-value, kind="stable")[:2]
        others = np.delete(value + range_, best)
        if value[best] - range_[best] < others.max() or value[best] == value[second]:
            return True
    return False
