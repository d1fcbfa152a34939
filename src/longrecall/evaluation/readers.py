"""Three ways to answer: with the true answer fed in, in the model's own words, and by choosing among options.

A reader turns samples into records, one each: plain JSON values with all that the result entries need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from longrecall.evaluation.memory import Room
from longrecall.evaluation.reading import (
    Ints,
    has_state_value,
    pad_right,
    read_continuations,
    read_predictions,
    read_prompts,
)
from longrecall.evaluation.scoring import score
from longrecall.tasks.encoding import IGNORE, Cell, ChoiceSample, QuestionSample, Sample, answer_spans
from longrecall.tasks.registry import GradedTask, QuestionTask

Record = dict[str, Any]
_EMPTY = np.zeros(0, dtype=np.int64)


class Size(NamedTuple):
    """What a sample takes: tokens to read after its shared ones, tokens in all, rows of a batch."""

    own: int
    context: int
    rows: int = 1


class Reader(Protocol):
    """Reads samples of one cell."""

    def size(self, sample: Any) -> Size:
        """Return how much `sample` takes."""
        ...

    def company(self, sample: Any) -> Hashable:
        """Return what samples must have in common to be read in one batch."""
        ...

    def read(self, samples: Sequence[Any], alone: bool) -> list[Record | None]:
        """Return the records of a batch; None for what is too close to call, which must then be read alone."""
        ...


class Prefixes:
    """The state after the tokens that samples share, read once and kept until other ones come.

    They are always read alone, so the state does not depend on the batches of those who share it.
    """

    def __init__(self, model: Any, room: Room) -> None:
        self._model, self._room = model, room
        self._known: tuple[Ints, Any] = (_EMPTY, None)

    def shared(self, sample: QuestionSample | ChoiceSample, most: int) -> int:
        """Return how many of the first `most` tokens are read once for all: none where a state is no value."""
        return max(0, min(sample.shared, most)) if has_state_value(self._model) else 0

    def state(self, tokens: Ints, rows: int) -> Any:
        """Return the state after `tokens`, repeated; None after no tokens."""
        if not len(tokens):
            return None
        known, state = self._known
        if not np.array_equal(known, tokens):
            self._known = (_EMPTY, None)
            state = read_prompts(self._model, [tokens], self._room.alone_tokens)[1]
            self._known = (tokens.copy(), state)
        return state if rows == 1 else state.repeat_rows(rows)


def _same_beginning(tokens: Ints) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest() if len(tokens) else b""


class LabelledReader:
    """One forward pass with the true answers fed in (`longrecall.evaluation.scoring`)."""

    def __init__(self, model: Any, room: Room, token_metric: str | None) -> None:
        self._model, self._room, self._count_tokens = model, room, token_metric is not None

    def size(self, sample: Sample) -> Size:
        return Size(len(sample.input_ids), len(sample.input_ids))

    def company(self, sample: Sample) -> Hashable:
        return None

    def read(self, samples: Sequence[Sample], alone: bool) -> list[Record | None]:
        """Return ``{"right", "asked", "right_tokens", "tokens", "finite"}`` of each sample."""
        labels = [sample.labels for sample in samples]
        ids = pad_right([sample.input_ids for sample in samples], 0)
        segment = self._room.alone_tokens if alone else self._room.segment_tokens
        scores = score(labels, read_predictions(self._model, ids, pad_right(labels, IGNORE), segment))
        close = scores.close | scores.close_tokens if self._count_tokens else scores.close
        return [
            None
            if close[row] and not alone
            else {
                "right": int(scores.right[row]),
                "asked": int(scores.asked[row]),
                "right_tokens": int(scores.right_tokens[row]),
                "tokens": int(scores.tokens[row]),
                "finite": not scores.diverged[row],
            }
            for row in range(len(samples))
        ]


class QuestionReader:
    """Greedy text after the prompt, judged by the task."""

    def __init__(self, model: Any, room: Room, tokenizer: Any, task: QuestionTask, cell: Cell) -> None:
        self._model, self._room, self._tokenizer, self._task, self._cell = model, room, tokenizer, task, cell
        self._prefixes = Prefixes(model, room)
        self._end: int | None = getattr(tokenizer, "eos_token_id", None)

    def size(self, sample: QuestionSample) -> Size:
        prompt, shared = self._parts(sample)
        return Size(len(prompt) - shared + 1, len(prompt) + self._task.answer_tokens)

    def company(self, sample: QuestionSample) -> Hashable:
        prompt, shared = self._parts(sample)
        length = 0 if has_state_value(self._model) else len(prompt)
        return _same_beginning(prompt[:shared]), length

    def read(self, samples: Sequence[QuestionSample], alone: bool) -> list[Record | None]:
        """Return ``{"said", "right", "exact", "finite", "group"}`` of each sample."""
        prompts, cuts = zip(*(self._parts(sample) for sample in samples), strict=True)
        shared = cuts[0]
        found = read_continuations(
            self._model,
            [prompt[shared:] for prompt in prompts],
            self._task.answer_tokens,
            self._room.alone_tokens if alone else self._room.segment_tokens,
            self._ended(samples),
            state=self._prefixes.state(prompts[0][:shared], len(samples)),
            end_token=self._end,
            decide=alone,
        )
        return [
            None if said.close else self._record(sample, said.tokens, said.finite, len(prompt))
            for sample, prompt, said in zip(samples, prompts, found, strict=True)
        ]

    def _parts(self, sample: QuestionSample) -> tuple[Ints, int]:
        prompt = sample.input_ids[: int(answer_spans(sample.labels)[-1, 0])]
        return prompt, self._prefixes.shared(sample, len(prompt) - 1)

    def _ended(self, samples: Sequence[QuestionSample]) -> Callable[[int, list[int]], bool]:
        task = self._task

        def ended(row: int, tokens: list[int]) -> bool:
            text = self._spell(tokens)
            return task.settled(samples[row], text) if isinstance(task, GradedTask) else task.ended(text)

        return ended

    def _spell(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _record(self, sample: QuestionSample, tokens: list[int], finite: bool, start: int) -> Record:
        text, answer = self._spell(tokens), sample.input_ids[start:].tolist()
        return {
            "said": text,
            "right": int(finite and self._task.judge(self._cell, sample, text)),
            "exact": int(finite and tokens[: len(answer)] == answer),
            "finite": finite,
            "group": sample.group,
        }


def without_tokens(sample: QuestionSample) -> QuestionSample:
    """Return `sample` without its tokens: what is left is small, and all that grades and text metrics look at."""
    return replace(sample, input_ids=_EMPTY, labels=_EMPTY)


class ChoiceReader:
    """The option with the lowest mean cross-entropy per token, after a prompt that is read once for all of them."""

    def __init__(self, model: Any, room: Room) -> None:
        self._model, self._room = model, room
        self._prefixes = Prefixes(model, room)

    def size(self, sample: ChoiceSample) -> Size:
        shared = self._prefixes.shared(sample, len(sample.prompt) - 1)
        longest = max(len(option) for option in sample.options)
        context = len(sample.prompt) + longest
        # What a sample's rows have in common is read in one row before them.
        own = max(longest + 1, -(-(len(sample.prompt) - shared) // len(sample.options)))
        return Size(own if has_state_value(self._model) else context, context, len(sample.options))

    def company(self, sample: ChoiceSample) -> Hashable:
        return _same_beginning(sample.prompt[: self._prefixes.shared(sample, len(sample.prompt) - 1)])

    def read(self, samples: Sequence[ChoiceSample], alone: bool) -> list[Record | None]:
        """Return ``{"choice", "right", "finite", "group"}`` of each sample."""
        segment = self._room.alone_tokens if alone else self._room.segment_tokens
        state, contexts = self._after_prompts(samples, segment)
        ids, labels = [], []
        for sample, context in zip(samples, contexts, strict=True):
            for option in sample.options:
                ids.append(np.concatenate((context, option)))
                labels.append(np.concatenate((np.full(len(context), IGNORE, dtype=np.int64), option)))
        read = read_predictions(self._model, pad_right(ids, 0), pad_right(labels, IGNORE), segment, state)
        counts = np.bincount(read.row, minlength=len(ids))
        if not counts.all():
            raise ValueError("every option needs at least one token, and a prompt before it")
        loss = np.bincount(read.row, weights=read.loss, minlength=len(ids)) / counts
        # Rounding moves a loss, a mean over the vocabulary, less than the one logit that it moves most.
        doubt = np.bincount(read.row, weights=read.doubt, minlength=len(ids)) / counts / 4
        finite = np.bincount(read.row, weights=~read.finite, minlength=len(ids)) == 0
        records: list[Record | None] = []
        start = 0
        for sample in samples:
            mine = slice(start, start + len(sample.options))
            start = mine.stop
            near = not alone and bool(finite[mine].all()) and _is_close(loss[mine], doubt[mine])
            records.append(None if near else _choice(sample, loss[mine], bool(finite[mine].all())))
        return records

    def _after_prompts(self, samples: Sequence[ChoiceSample], segment: int) -> tuple[Any, list[Ints]]:
        """Return the state to read options from, one row each, and the tokens to read before each sample's."""
        if not has_state_value(self._model):
            return None, [sample.prompt for sample in samples]
        shared = self._prefixes.shared(samples[0], len(samples[0].prompt) - 1)
        state = self._prefixes.state(samples[0].prompt[:shared], len(samples))
        # The last token predicts the first of each option, so it is read with them.
        rest = [sample.prompt[shared:-1] for sample in samples]
        if any(len(row) for row in rest):
            state = read_prompts(self._model, rest, segment, state)[1]
        elif state is None:
            state = self._model.zero_state(len(samples))
        row = [index for index, sample in enumerate(samples) for _ in sample.options]
        return state.select_rows(torch.tensor(row)), [sample.prompt[-1:] for sample in samples]


def _is_close(loss: np.ndarray[Any, Any], doubt: np.ndarray[Any, Any]) -> bool:
    order = np.argsort(loss, kind="stable")
    best, second = order[:2]
    return bool(loss[second] - loss[best] < doubt[second] + doubt[best])


def _choice(sample: ChoiceSample, loss: np.ndarray[Any, Any], finite: bool) -> Record:
    choice = int(np.argmin(loss)) if finite else -1
    return {"choice": choice, "right": int(choice == sample.answer), "finite": finite, "group": sample.group}
