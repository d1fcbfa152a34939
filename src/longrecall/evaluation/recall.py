"""Running one cell of a recall task: samples, batches, answers, interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longrecall.evaluation.reading import pad_right, read_continuation, read_predictions
from longrecall.evaluation.scoring import score_answers, score_tokens
from longrecall.evaluation.statistics import clustered_wilson_interval
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, Sample, answer_spans
from longrecall.tasks.registry import QuestionTask, RecallTask

Counts = NDArray[np.int64]
_S = TypeVar("_S", bound=Sample)


def sequences_needed(task: RecallTask, cell: Cell, samples: int) -> int:
    """Return how many sequences give at least `samples` answers."""
    return -(-samples // task.answers_per_sample(cell))


@dataclass(frozen=True)
class _Reader:
    """How a model reads batches: at most `batch_tokens` tokens at once, `segment_tokens` columns of them."""

    model: Any
    batch_tokens: int
    segment_tokens: int
    advance: Callable[[int], object]


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
    reader = _Reader(model, batch_tokens, segment_tokens, advance)
    return _labelled_entries(reader, encode, task, cell, samples, seed)[0]


def measure_cell(
    model: Any,
    tokenizer: Any,
    encode: PieceEncoder,
    task: RecallTask,
    cell: Cell,
    samples: int,
    seed: int,
    batch_tokens: int,
    segment_tokens: int,
    advance: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Return every result entry of one cell, accuracy first.

    A `QuestionTask` answers in its own words, which `tokenizer` spells: ``accuracy`` is its own judgement of them,
    ``exact_match`` the share whose first tokens are the answer's. Other tasks are scored with the true answer fed in
    (`run_cell`); one with a `token_metric` adds the share of single tokens that are right.
    """
    reader = _Reader(model, batch_tokens, segment_tokens, advance)
    if isinstance(task, QuestionTask):
        return _question_entries(reader, tokenizer, encode, task, cell, samples, seed)
    return _labelled_entries(reader, encode, task, cell, samples, seed)


def _labelled_entries(
    reader: _Reader, encode: PieceEncoder, task: RecallTask, cell: Cell, samples: int, seed: int
) -> list[dict[str, Any]]:
    sequences = sequences_needed(task, cell, samples)
    produced = (task.sample(encode, cell, index, seed) for index in range(sequences))
    answers, tokens, diverged = [], [], 0
    for batch in _batches(produced, reader.batch_tokens, reader.segment_tokens):
        labels = [sample.labels for sample in batch]
        ids = pad_right([sample.input_ids for sample in batch], 0)
        read = read_predictions(reader.model, ids, pad_right(labels, IGNORE), reader.segment_tokens)
        right, asked, lost = score_answers(labels, read)
        answers.append((right, asked))
        tokens.append(score_tokens(labels, read))
        diverged += int(lost.sum())
        reader.advance(sum(len(sample.input_ids) for sample in batch))
    token_metric = getattr(task, "token_metric", None)
    metrics = {"accuracy": answers} | ({token_metric: tokens} if token_metric else {})
    return [_entry(task, cell, metric, parts, diverged) for metric, parts in metrics.items()]


def _question_entries(
    reader: _Reader,
    tokenizer: Any,
    encode: PieceEncoder,
    task: QuestionTask,
    cell: Cell,
    samples: int,
    seed: int,
) -> list[dict[str, Any]]:
    produced = (task.sample(encode, cell, index, seed) for index in range(sequences_needed(task, cell, samples)))

    def spell(said: Counts) -> list[str]:
        return [tokenizer.decode(row, skip_special_tokens=True) for row in said.tolist()]

    def ended(said: Counts) -> bool:
        return all(task.ended(text) for text in spell(said))

    judged, exact, diverged = [], [], 0
    for batch in _batches(produced, reader.batch_tokens, reader.segment_tokens):
        starts = [int(answer_spans(sample.labels)[-1, 0]) for sample in batch]
        prompts = np.stack([sample.input_ids[:start] for sample, start in zip(batch, starts, strict=True)])
        said, finite = read_continuation(reader.model, prompts, task.answer_tokens, reader.segment_tokens, ended)
        right = [task.judge(cell, sample, text) for sample, text in zip(batch, spell(said), strict=True)]
        answers = [sample.input_ids[start:] for sample, start in zip(batch, starts, strict=True)]
        same = [answer.tolist() == row[: len(answer)] for answer, row in zip(answers, said.tolist(), strict=True)]
        ones = np.ones(len(batch), dtype=np.int64)
        judged.append((np.array(right, dtype=np.int64) * finite, ones))
        exact.append((np.array(same, dtype=np.int64) * finite, ones))
        diverged += int((~finite).sum())
        reader.advance(sum(len(sample.input_ids) for sample in batch))
    return [_entry(task, cell, "accuracy", judged, diverged), _entry(task, cell, "exact_match", exact, diverged)]


def _entry(
    task: RecallTask, cell: Cell, metric: str, parts: Sequence[tuple[Counts, Counts]], diverged: int
) -> dict[str, Any]:
    """Return a result entry from (right, asked) of the sequences of each batch."""
    right, asked = (np.concatenate(column) for column in zip(*parts, strict=True))
    low, high = clustered_wilson_interval(right, asked)
    return {
        "task": task.name,
        "cell": dict(cell),
        "metric": metric,
        "value": float(right.sum() / asked.sum()),
        "count": int(asked.sum()),
        "low": low,
        "high": high,
        "sequences": len(asked),
        "diverged": diverged,
    }


def _batches(samples: Iterator[_S], batch_tokens: int, segment_tokens: int) -> Iterator[list[_S]]:
    """Group samples so that one segment of all rows has at most `batch_tokens` tokens (and at least one row)."""
    batch: list[_S] = []
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample.input_ids))
        if batch and (len(batch) + 1) * min(longest, segment_tokens) > batch_tokens:
            yield batch
            batch, longest = [], len(sample.input_ids)
        batch.append(sample)
    if batch:
        yield batch
