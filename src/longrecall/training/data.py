"""The stream of training batches: sources, mixed by weight, that continue exactly where a checkpoint left them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from longrecall.errors import UserError
from longrecall.training.encoding import Ints
from longrecall.training.opening import assign_rows, open_source
from longrecall.training.prefetch import default_workers, read_beside
from longrecall.training.recipe import DataRecipe
from longrecall.training.sources import CorpusSource, TaskSource, TokenSequence, random_generator

MIXTURE_STREAM = 3
DRAWS = 1024
"""Sequences whose sources are drawn with one generator."""
POSITION_FORMAT = 2
"""1, without a number, were positions that belonged to processes."""

Batch = dict[str, Any]
"""`input_ids`, `labels` int64 ``[B, T]``; `text` bool ``[B]``: running text, not a task; `starts`: for each row the
columns where documents start; `source`: for each row its number in the recipe; `origin`: where each row is from;
`first`: number of its first sequence in the run."""


class Row(NamedTuple):
    """One row of a batch, as a data worker gives it."""

    row: int
    """Of this process's rows."""
    ids: Ints
    labels: Ints | None
    """None: the ids themselves."""
    starts: tuple[int, ...]
    source: int
    """Its number in the recipe."""
    origin: str
    lane: tuple[int, int] | None
    """Source and lane that it was read from, None for a task."""
    position: list[Any]
    """Where the lane stands after it."""


class BatchStream(IterableDataset[Batch]):
    """Endless batches of the mixture for one process.

    The order belongs to the global batch of R = `batch_size` x `data_world` rows, of which this process has the rows
    from `data_rank` x `batch_size` on: sequence n of the run is row n mod R of batch n div R, and depends on the seed,
    the data and R alone. So the processes may be 1, 2 or 16, and others after a resume: the sequences stay the same.
    A process reads and tokenises nothing for the others.

    `position` is small JSON data; `restore` continues from it with the very same batches. That of one process covers
    its own rows; `join_positions` makes one of all rows from those of all processes, which any process continues from.

    Iterating reads ahead in processes of its own (recipe: `data.workers`); `position` is always that after the batch
    that was given last, whatever has been read ahead.

    Args:
        recipe: the data section.
        tokenizer: of the checkpoint.
        batch_size: rows B of a batch of this process.
        data_rank, data_world: this process, and the number of processes that share the global batch.
        continued: row i of a batch goes on in the text that row i of the batch before was reading. Every row belongs to
            one source of text; tasks are still drawn by weight and only make its text wait.

    Raises:
        UserError: a source is missing, empty, not UTF-8, too short for the context, or malformed; with `continued`
            also a source that gets no row, or no text at all.
    """

    def __init__(
        self,
        recipe: DataRecipe,
        tokenizer: Any,
        batch_size: int,
        data_rank: int = 0,
        data_world: int = 1,
        *,
        continued: bool = False,
    ) -> None:
        self._made_of = (recipe, tokenizer, batch_size, data_rank, data_world, continued)
        self._seed, self._workers = recipe.seed, recipe.workers
        self._batch_size, self._rows, self._first = batch_size, batch_size * data_world, batch_size * data_rank
        self.context_length = recipe.context_length
        weights = np.array([source.weight for source in recipe.sources], dtype=np.float64)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._owners = assign_rows(recipe.sources, self._rows) if continued else None
        self._sources: list[CorpusSource | TaskSource] = []
        for number, source in enumerate(recipe.sources):
            rows = self._rows if self._owners is None else sum(owner == number for owner, _ in self._owners)
            try:
                opened = open_source(source, tokenizer, recipe.context_length, recipe.seed, number, rows, continued)
            except UserError as error:
                raise UserError(f"data.sources.{number} ({source.kind}): {error}") from None
            self._sources.append(opened)
        self._batch = 0
        self._draws: tuple[int, NDArray[np.float64]] | None = None
        self._lanes: dict[tuple[int, int], list[Any]] = {}
        """Source and lane -> where it stands after the last batch that was given."""
        self._waited, self._counted_from = 0.0, time.perf_counter()

    def __reduce__(self) -> tuple[Any, ...]:
        """What another process makes one of that stands at the same place."""
        return _made_again, (*self._made_of, self.position())

    def next_batch(self) -> Batch:
        """Return the next batch, read in this process."""
        return self._give(self.read_rows(self._batch, range(self._batch_size)))

    def read_rows(self, batch: int, rows: Sequence[int]) -> list[Row]:
        """Return some of this process's rows of batch number `batch`, which must be the next one for their lanes."""
        numbers = self._draw(batch)
        return [self._read_row(batch, row, numbers[row]) for row in rows]

    def rows_of_worker(self, batch: int, worker: int, workers: int) -> list[int]:
        """Return the rows of a batch that one of several workers reads: any lane is always read by the same worker."""
        turns = [
            batch if isinstance(source, TaskSource) else batch % source.lanes_per_row
            for source in (self._sources[number] for number in self._draw(batch))
        ]
        return [row for row, turn in enumerate(turns) if (row + turn) % workers == worker]

    def _draw(self, batch: int) -> list[int]:
        """Return the number of the source that gives each row of this process."""
        first = batch * self._rows + self._first
        last = first + self._batch_size - 1
        blocks = [self._draws_of(block) for block in range(first // DRAWS, last // DRAWS + 1)]
        draws = np.concatenate(blocks)[first % DRAWS :][: self._batch_size]
        found = np.searchsorted(self._cumulative, draws, side="right")
        # The last cumulative weight can fall short of 1 by rounding.
        numbers: list[int] = found.clip(max=len(self._sources) - 1).tolist()
        if self._owners is None:
            return numbers
        return [
            number if isinstance(self._sources[number], TaskSource) else self._owners[self._first + row][0]
            for row, number in enumerate(numbers)
        ]

    def _draws_of(self, block: int) -> NDArray[np.float64]:
        """Return the draws in [0, 1) of the sequences from `block` x `DRAWS` on: one generator for all of them."""
        if self._draws is None or self._draws[0] != block:
            self._draws = block, random_generator(self._seed, block, MIXTURE_STREAM).random(DRAWS)
        return self._draws[1]

    def _read_row(self, batch: int, row: int, number: int) -> Row:
        """Return one row, from source `number`."""
        place = self._first + row
        source = self._sources[number]
        if isinstance(source, TaskSource):
            made = source.sequence(batch * self._rows + place)
            return Row(row, made.input_ids, made.labels, made.starts, number, made.origin, None, [])
        lane = source.lane_of(place if self._owners is None else self._owners[place][1], batch)
        try:
            read: TokenSequence = source.next_of(lane)
        except UserError as error:
            raise UserError(f"data.sources.{number}: {error}") from None
        return Row(
            row, read.input_ids, None, read.starts, number, read.origin, (number, lane), source.position_of(lane)
        )

    def _give(self, rows: Sequence[Row]) -> Batch:
        """Return the batch of all its rows, and stand behind it."""
        rows = sorted(rows)
        first = self._batch * self._rows + self._first
        self._batch += 1
        self._lanes.update({row.lane: row.position for row in rows if row.lane is not None})
        return {
            "input_ids": torch.from_numpy(np.stack([row.ids for row in rows])),
            "labels": torch.from_numpy(np.stack([row.ids if row.labels is None else row.labels for row in rows])),
            "text": torch.tensor([row.lane is not None for row in rows]),
            "starts": [row.starts for row in rows],
            "source": [row.source for row in rows],
            "origin": [row.origin for row in rows],
            "first": first,
        }

    def __iter__(self) -> Iterator[Batch]:
        workers = min(default_workers() if self._workers is None else self._workers, self.widest)
        self._waited, self._counted_from = 0.0, time.perf_counter()
        with contextlib.closing(self._read(workers)) as batches:
            try:
                while True:
                    begun = time.perf_counter()
                    batch = next(batches)
                    self._waited += time.perf_counter() - begun
                    yield batch
            finally:
                # With workers, what this process itself would read next is still where they began.
                self.restore(self.position())

    def _read(self, workers: int) -> Generator[Batch, None, None]:
        """Give the next batches, read by so many workers, or in this process."""
        if workers:
            yield from map(self._give, read_beside(self, self._batch, workers))
        while True:
            yield self.next_batch()

    @property
    def widest(self) -> int:
        """Workers beyond which some would have nothing to read: there is one for each lane at most."""
        lanes = [1 if isinstance(source, TaskSource) else source.lanes_per_row for source in self._sources]
        return self._batch_size * max(lanes)

    def waited_share(self) -> float:
        """Return which share of the time since the last call (or the first batch) was spent waiting for batches."""
        now = time.perf_counter()
        share = self._waited / max(1e-9, now - self._counted_from)
        self._waited, self._counted_from = 0.0, now
        return min(1.0, share)

    def position(self) -> dict[str, Any]:
        """Return where this process's rows stand after the last batch, as JSON data."""
        lanes = sorted(self._lanes.items())
        return {
            "format": POSITION_FORMAT,
            "batch": self._batch,
            "rows": self._rows,
            "covers": [[self._first, self._first + self._batch_size]],
            "sources": [
                {
                    "amount": _amount(source),
                    "lanes": {str(lane): place for (owner, lane), place in lanes if owner == number},
                }
                for number, source in enumerate(self._sources)
            ],
        }

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue from a position that covers this process's rows, of a stream with the same recipe and data.

        Raises:
            UserError: of an older version, of other sources or data, of another number of rows.
        """
        self._check(position)
        self._batch = int(position["batch"])
        self._lanes = {}
        for number, (source, saved) in enumerate(zip(self._sources, position["sources"], strict=True)):
            if isinstance(source, TaskSource):
                continue
            own = {lane for row in self._rows_of(number) for lane in source.lanes_of(row)}
            places = {int(lane): place for lane, place in saved["lanes"].items() if int(lane) in own}
            source.restore(places)
            self._lanes.update({(number, lane): place for lane, place in places.items()})

    def _check(self, position: Mapping[str, Any]) -> None:
        if position.get("format") != POSITION_FORMAT:
            raise UserError(
                "the checkpoint was saved by an older version, whose order of the data cannot be continued exactly. "
                "Begin a new run with model.checkpoint set to its folder"
            )
        if len(position["sources"]) != len(self._sources):
            raise UserError("the recipe has other data sources than the checkpoint was trained with")
        if position["rows"] != self._rows:
            raise UserError(
                f"the checkpoint was trained with batches of {position['rows']} rows over all processes, and now there "
                f"are {self._rows}. Choose run.batch_size so that run.batch_size times the number of processes is "
                "the same"
            )
        first, last = self._first, self._first + self._batch_size
        if not any(begin <= first and last <= end for begin, end in position["covers"]):
            raise UserError(
                f"the saved data position lacks some of the rows {first} to {last - 1}: a part of the checkpoint is "
                "missing"
            )
        for number, (source, saved) in enumerate(zip(self._sources, position["sources"], strict=True)):
            if saved["amount"] != _amount(source):
                raise UserError(
                    f"data.sources.{number}: the training data has changed since the checkpoint was saved; resume with "
                    "the same files"
                )

    def _rows_of(self, number: int) -> list[int]:
        """Return which of a source's rows are this process's."""
        rows = range(self._first, self._first + self._batch_size)
        if self._owners is None:
            return list(rows)
        return [place for owner, place in (self._owners[row] for row in rows) if owner == number]


def _made_again(
    recipe: DataRecipe,
    tokenizer: Any,
    batch_size: int,
    rank: int,
    world: int,
    continued: bool,
    position: dict[str, Any],
) -> BatchStream:
    stream = BatchStream(recipe, tokenizer, batch_size, rank, world, continued=continued)
    stream.restore(position)
    return stream


def join_positions(positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the position of all rows from those of the processes, which all stand after the same batch.

    Processes that read the same rows (of one context group) may both be there.

    Raises:
        UserError: they are not of the same batch of the same run.
    """
    heads = [{name: position.get(name) for name in ("format", "batch", "rows")} for position in positions]
    if any(head != heads[0] for head in heads) or len({len(position["sources"]) for position in positions}) > 1:
        raise UserError("the data positions of the processes do not belong together: they are of different batches")
    covers: list[list[int]] = []
    for begin, end in sorted(tuple(span) for position in positions for span in position["covers"]):
        if covers and begin <= covers[-1][1]:
            covers[-1][1] = max(end, covers[-1][1])
        else:
            covers.append([begin, end])
    sources: list[dict[str, Any]] = []
    for parts in zip(*(position["sources"] for position in positions), strict=True):
        lanes = {int(lane): place for part in parts for lane, place in part["lanes"].items()}
        sources.append({"amount": parts[0]["amount"], "lanes": {str(lane): lanes[lane] for lane in sorted(lanes)}})
    return {**heads[0], "covers": covers, "sources": sources}


def _amount(source: CorpusSource | TaskSource) -> list[int]:
    return [] if isinstance(source, TaskSource) else source.corpus.amount()
