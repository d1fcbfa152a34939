"""Running one cell of a recall task: samples, batches, records of single samples, result entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from longrecall.errors import UserError
from longrecall.evaluation.graded import grade_entries, mean_fill
from longrecall.evaluation.memory import Room
from longrecall.evaluation.outcomes import pack_answers
from longrecall.evaluation.readers import (
    ChoiceReader,
    LabelledReader,
    QuestionReader,
    Reader,
    Record,
    without_tokens,
)
from longrecall.evaluation.statistics import clustered_wilson_interval
from longrecall.evaluation.text_metrics import text_entries
from longrecall.tasks.encoding import Cell, PieceEncoder, QuestionSample, cell_key
from longrecall.tasks.registry import ChoiceTask, GradedTask, QuestionTask, RecallTask, TextMetricTask

# Samples that wait to be sorted into batches: at most so many, and so many tokens (ids and labels take 16 bytes each).
_POOL_SAMPLES = 1024
_POOL_TOKENS = 2**22
# After so many samples, more than half of them too close to call, the others are read alone at once.
_TRIED = 16

Advance = Callable[[int], object]
Records = dict[int, Record]


def sequences_needed(task: RecallTask | ChoiceTask, cell: Cell, samples: int) -> int:
    """Return how many sequences give at least `samples` answers; a task with fewer `available` gives all it has."""
    needed = -(-samples // task.answers_per_sample(cell))
    available = getattr(task, "available", None)
    return needed if available is None else min(needed, int(available(cell)))


class CellJob:
    """All samples of one cell of a recall task, each of which can be read by itself."""

    align = 1

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        encode: PieceEncoder,
        task: RecallTask | ChoiceTask,
        cell: Cell,
        samples: int,
        seed: int,
        room: Room,
    ) -> None:
        self.key = cell_key(task.name, cell)
        self.count = sequences_needed(task, cell, samples)
        self._encode, self._task, self._cell, self._seed, self._room = encode, task, cell, seed, room
        self._reader: Reader = _reader(model, tokenizer, task, cell, room)
        self._seen: dict[int, QuestionSample] = {}
        self._tried = self._close = 0
        # Impossible cells fail here, before anything runs.
        self.tokens = self._reader.size(self._sample(0)).context

    def run(self, indexes: Sequence[int], advance: Advance) -> Iterator[Records]:
        """Read these samples; yield their records batch by batch."""
        pool: list[tuple[int, Any]] = []
        tokens = 0
        for index in indexes:
            sample = self._sample(index)
            pool.append((index, sample))
            tokens += self._reader.size(sample).context
            if len(pool) == _POOL_SAMPLES or tokens >= _POOL_TOKENS:
                yield from self._run_pool(pool, advance)
                pool, tokens = [], 0
        yield from self._run_pool(pool, advance)

    def entries(self, records: Records) -> list[dict[str, Any]]:
        """Return the result entries of the cell, accuracy first."""
        rows = [records[index] for index in range(self.count)]
        task, diverged = self._task, [not row["finite"] for row in rows]
        if isinstance(task, ChoiceTask) or not isinstance(task, QuestionTask):
            name = None if isinstance(task, ChoiceTask) else getattr(task, "token_metric", None)
            right, asked = [row["right"] for row in rows], [row.get("asked", 1) for row in rows]
            groups = [row.get("group") for row in rows]
            entries = [_entry(self._task, self._cell, "accuracy", right, asked, groups, diverged)]
            if name is not None:
                right, asked = [row["right_tokens"] for row in rows], [row["tokens"] for row in rows]
                entries.append(_entry(self._task, self._cell, name, right, asked, groups, diverged))
            return entries
        groups, ones = [row["group"] for row in rows], [1] * len(rows)
        entries = [
            _entry(task, self._cell, metric, [row[key] for row in rows], ones, groups, diverged)
            for metric, key in (("accuracy", "right"), ("exact_match", "exact"))
        ]
        said, finite = [str(row["said"]) for row in rows], ~np.array(diverged)
        if isinstance(task, GradedTask):
            entries += grade_entries(task, self._cell, self._questions(), said, finite)
        if isinstance(task, TextMetricTask):
            entries += text_entries(task, self._cell, self._questions(), said, finite)
        return [entry | mean_fill(self._questions()) for entry in entries] if isinstance(task, GradedTask) else entries

    def _sample(self, index: int) -> Any:
        try:
            return self._task.sample(self._encode, self._cell, index, self._seed)
        except MemoryError:
            raise UserError(f"{self.key}: there is not enough memory to make a sample; use shorter lengths") from None

    def _questions(self) -> list[QuestionSample]:
        """Return all samples without their tokens; those that another run or process has read are made again."""
        for index in range(self.count):
            if index not in self._seen:
                self._seen[index] = without_tokens(self._sample(index))
        return [self._seen[index] for index in range(self.count)]

    def _run_pool(self, pool: list[tuple[int, Any]], advance: Advance) -> Iterator[Records]:
        for batch in self._batches(pool):
            found = self._read([sample for _, sample in batch])
            for index, sample in batch:
                if isinstance(sample, QuestionSample):
                    self._seen[index] = without_tokens(sample)
            yield {index: record for (index, _), record in zip(batch, found, strict=True)}
            advance(sum(self._reader.size(sample).context for _, sample in batch))

    def _batches(self, pool: list[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
        """Sort a pool into batches: of samples that can keep company, the longest first."""
        companies: dict[Any, list[tuple[int, Any]]] = {}
        for index, sample in pool:
            companies.setdefault(self._reader.company(sample), []).append((index, sample))
        for members in companies.values():
            waiting = sorted(members, key=lambda member: -self._reader.size(member[1]).own)
            while waiting:
                rows = 1 if self._mostly_close() else self._rows(waiting)
                yield waiting[:rows]
                waiting = waiting[rows:]

    def _rows(self, waiting: list[tuple[int, Any]]) -> int:
        """Return how many of the first samples make a batch."""
        first = self._reader.size(waiting[0][1])
        rows = self._room.rows(first.own, first.context, first.rows)
        # Only the first is known to be the longest; others may keep a longer context or take more rows.
        for _, sample in waiting[1:rows]:
            size = self._reader.size(sample)
            rows = min(rows, self._room.rows(first.own, size.context, size.rows))
        return rows

    def _mostly_close(self) -> bool:
        return self._tried >= _TRIED and 2 * self._close > self._tried

    def _read(self, samples: list[Any]) -> list[Record]:
        """Return the records of a batch. What is too close to call, and a batch of one, is read alone."""
        if len(samples) > 1:
            found = self._room.run(samples, lambda part: self._reader.read(part, alone=False), self._each(samples))
            self._tried += len(found)
            self._close += found.count(None)
        else:
            found = [None]
        return [
            self._room.run([sample], self._alone, self._each([sample]))[0] if record is None else record
            for sample, record in zip(samples, found, strict=True)
        ]

    def _each(self, samples: list[Any]) -> int:
        return max(size.own * size.rows for size in map(self._reader.size, samples))

    def _alone(self, samples: list[Any]) -> list[Record]:
        return cast(list[Record], self._reader.read(samples, alone=True))


def _reader(model: Any, tokenizer: Any, task: RecallTask | ChoiceTask, cell: Cell, room: Room) -> Reader:
    if isinstance(task, ChoiceTask):
        return ChoiceReader(model, room)
    if isinstance(task, QuestionTask):
        return QuestionReader(model, room, tokenizer, task, cell)
    return LabelledReader(model, room, getattr(task, "token_metric", None))


def run_cell(
    model: Any,
    encode: PieceEncoder,
    task: RecallTask,
    cell: Cell,
    samples: int,
    seed: int,
    batch_tokens: int,
    segment_tokens: int,
    advance: Advance,
) -> dict[str, Any]:
    """Return the first result entry of one cell of a task that is scored with the true answer fed in: its accuracy.

    An answer whose logits are not finite is wrong; `diverged` counts the sequences with such logits.
    """
    job = CellJob(model, None, encode, task, cell, samples, seed, Room(model, batch_tokens, segment_tokens))
    records: Records = {}
    for part in job.run(range(job.count), advance):
        records |= part
    return job.entries(records)[0]


def _entry(
    task: RecallTask | ChoiceTask,
    cell: Cell,
    metric: str,
    right: Sequence[int],
    asked: Sequence[int],
    groups: Iterable[str | None],
    diverged: Sequence[bool],
) -> dict[str, Any]:
    """Return a result entry from what every sample got right; samples of one group are one unit, not independent."""
    names = [index if group is None else group for index, group in enumerate(groups)]
    unit_of = {name: unit for unit, name in enumerate(dict.fromkeys(names))}
    unit = np.array([unit_of[name] for name in names])
    some = np.bincount(unit, weights=right).astype(np.int64)
    all_of = np.bincount(unit, weights=asked).astype(np.int64)
    low, high = clustered_wilson_interval(some, all_of)
    return {
        "task": task.name,
        "cell": dict(cell),
        "metric": metric,
        "value": float(some.sum() / all_of.sum()),
        "count": int(all_of.sum()),
        "low": low,
        "high": high,
        "sequences": len(all_of),
        "diverged": int((np.bincount(unit, weights=diverged) > 0).sum()),
        "outcomes": pack_answers(some, all_of),
    }
