"""Endless sources of training sequences; each can be put back to any place from a few numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.installing import install_command
from longrecall.training.corpus import Corpus

Ints = NDArray[np.int64]

LANES = 64
"""Places of a corpus that are read side by side: neighbouring sequences of a batch come from different texts."""
NOT_BEGUN = -1
ROW_GROUP_LANES = 4
"""The same for parquet, where every lane keeps a row group in memory."""


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence: `input_ids` and `labels` int64 ``[T]`` (-100 = no loss), and where it came from."""

    input_ids: Ints
    labels: Ints
    origin: str
    starts: tuple[int, ...] = (0,)
    """Columns where documents start; without 0 the sequence goes on in a document that began before it."""


class SequenceSource(Protocol):
    """An endless stream; its sequence number `index` depends on nothing but the seed and `index`."""

    def next(self) -> TokenSequence:
        """Return the next sequence."""

    def position(self) -> dict[str, Any]:
        """Return where the stream stands, as small JSON data."""

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from a position that `position` returned."""


class Encoder(Protocol):
    """Text -> token ids ``[n]`` with the end token last."""

    def __call__(self, document: str) -> Ints:
        """Return the ids of one document."""
        ...


def random_generator(*key: int) -> np.random.Generator:
    """Return the generator that belongs to `key`: the same on every platform, unrelated for unequal keys."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


@dataclass(frozen=True)
class Shard:
    """Which part of the data this process reads, and the seed of the order."""

    seed: int
    source: int = 0
    """Number of the source in the recipe."""
    rank: int = 0
    world: int = 1


class _Lane:
    """One reader of a corpus: its chunks, in a new order every epoch, joined and cut into sequences."""

    def __init__(self, corpus: Corpus, encode: Encoder, shard: Shard, lane: int, lanes: int) -> None:
        self._corpus, self._encode, self._shard = corpus, encode, shard
        self._stream, self._streams = shard.rank * lanes + lane, shard.world * lanes
        self.epoch = self.turn = self.document = 0
        self.offset = NOT_BEGUN
        self._shares = len(corpus) < self._streams
        """Fewer chunks than readers: every reader walks through all of them, each from a place of its own."""
        self._order: Ints | None = None
        self._documents: list[str] | None = None
        self._tokens: Ints | None = None

    def _chunk(self) -> int:
        if self._order is None:
            order = random_generator(self._shard.seed, self._shard.source, self.epoch).permutation(len(self._corpus))
            if self._shares:
                self._order = np.roll(order, -self._stream)
            else:
                self._order = order[self._stream :: self._streams].copy()
        return int(self._order[self.turn])

    def _advance(self) -> None:
        """Step to the next document, chunk or epoch."""
        if self._documents is None:
            self._documents = list(self._corpus.read(self._chunk()))
        self._tokens, self.offset = None, 0
        self.document += 1
        if self.document >= len(self._documents):
            self._documents, self.document = None, 0
            self.turn += 1
            if self._order is not None and self.turn >= len(self._order):
                self._order, self.turn = None, 0
                self.epoch += 1

    def _rest(self) -> Ints:
        """Return the unread tokens of the current document."""
        chunk = self._chunk()
        if self._documents is None:
            self._documents = list(self._corpus.read(chunk))
        part = 0
        if self.offset == NOT_BEGUN and self._shares:
            # Readers of the same chunk would otherwise all give the same sequences.
            self.document, part = divmod(len(self._documents) * self._stream, self._streams)
        if self._tokens is None:
            empty = self.document >= len(self._documents)
            self._tokens = np.empty(0, np.int64) if empty else self._encode(self._documents[self.document])
        if self.offset == NOT_BEGUN:
            self.offset = len(self._tokens) * part // self._streams
        return self._tokens[self.offset :]

    def take(self, length: int) -> TokenSequence:
        """Return the next `length` tokens, every one labelled, with the place of the first."""
        parts: list[Ints] = []
        starts: list[int] = []
        missing, origin = length, ""
        while missing:
            rest = self._rest()
            if not len(rest):
                self._advance()
                continue
            origin = origin or self._corpus.describe(self._chunk())
            if not self.offset:
                starts.append(length - missing)
            parts.append(rest[:missing])
            self.offset += len(parts[-1])
            missing -= len(parts[-1])
        ids = np.concatenate(parts)
        return TokenSequence(ids, ids, origin, tuple(starts))

    def position(self) -> list[int]:
        return [self.epoch, self.turn, self.document, self.offset]

    def restore(self, position: list[int]) -> None:
        self.epoch, self.turn, self.document, self.offset = position
        self._order = self._documents = self._tokens = None


class CorpusSource:
    """Sequences of `length` tokens from a corpus: several lanes read it side by side, a random one gives each sequence.

    Every epoch of a lane has a new order. The processes read disjoint chunks as long as there are enough of them.

    Args:
        rows: give this many lanes, for `next_of` alone: each belongs to a row of the batch, which reads its texts from
            start to end. Lanes that have no chunk of their own begin at different places of the same ones.

    Raises:
        UserError: the corpus has fewer than `length` tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        encode: Encoder,
        length: int,
        shard: Shard,
        lanes: int = LANES,
        rows: int | None = None,
    ) -> None:
        self._length, self._shard = length, shard
        _check_enough(corpus, encode, length)
        count = max(1, min(lanes, len(corpus) // shard.world)) if rows is None else rows
        self._lanes = [_Lane(corpus, encode, shard, lane, count) for lane in range(count)]
        self._index = 0

    def next(self) -> TokenSequence:
        """Return the next sequence; every token of it is labelled."""
        shard = self._shard
        draw = random_generator(shard.seed, shard.source, shard.rank, self._index, 1).random()
        return self.next_of(int(draw * len(self._lanes)))

    def next_of(self, lane: int) -> TokenSequence:
        """Return the next sequence of one lane."""
        self._index += 1
        return self._lanes[lane].take(self._length)

    def position(self) -> dict[str, Any]:
        """Return the number of sequences given and the place of every lane."""
        return {"index": self._index, "lanes": [lane.position() for lane in self._lanes]}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from `position`; UserError when the data has another number of lanes than it had."""
        if len(position["lanes"]) != len(self._lanes):
            raise UserError("the training data has changed since the checkpoint was saved; resume with the same files")
        self._index = position["index"]
        for lane, place in zip(self._lanes, position["lanes"], strict=True):
            lane.restore(place)


def _check_enough(corpus: Corpus, encode: Encoder, length: int) -> None:
    tokens = 0
    for chunk in range(len(corpus)):
        for document in corpus.read(chunk):
            tokens += len(encode(document))
            if tokens >= length:
                return
    raise UserError(
        f"the data has only {tokens} tokens, fewer than the context_length {length}; shorten the context or add data"
    )


class TaskSource:
    """Sequences that a task makes on the fly.

    Args:
        make: (generator, length) -> (input_ids, labels), int64 ``[length]`` each.
    """

    def __init__(
        self, name: str, make: Callable[[np.random.Generator, int], tuple[Ints, Ints]], length: int, shard: Shard
    ) -> None:
        self._name, self._make, self._length, self._shard = name, make, length, shard
        self._index = 0
        # A context that cannot hold the task shows here, before the run starts.
        self._make(random_generator(0), length)

    def next(self) -> TokenSequence:
        """Return the next sequence, labelled as the task says."""
        shard = self._shard
        generator = random_generator(shard.seed, shard.source, shard.rank, self._index, 2)
        ids, labels = self._make(generator, self._length)
        self._index += 1
        return TokenSequence(ids, labels, f"{self._name} sample {self._index - 1}")

    def position(self) -> dict[str, Any]:
        """Return the number of sequences given."""
        return {"index": self._index}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from `position`."""
        self._index = position["index"]


class HubSource:
    """A `datasets` dataset, streamed in stored order and from its start again at its end. Needs the datasets library.

    Its position is the library's own (`IterableDataset.state_dict`) at the current document, and the tokens used of it.

    Raises:
        UserError: datasets is missing, there is no such dataset, split or text column, or it has too few tokens.
    """

    def __init__(
        self, name: str, config: str | None, split: str, column: str, encode: Encoder, length: int, shard: Shard
    ) -> None:
        self._name, self._config, self._split, self._column = name, config, split, column
        self._encode, self._length, self._shard = encode, length, shard
        self._tokens: Ints = np.empty(0, np.int64)
        self._start: dict[str, Any] | None = None
        self._offset = self._epoch = self._given = 0
        self._open(None)

    def _open(self, start: dict[str, Any] | None) -> None:
        try:
            import datasets
            from datasets.distributed import split_dataset_by_node
        except ImportError:
            raise UserError(f"hub datasets need datasets; install it with: {install_command('datasets')}") from None
        try:
            data = datasets.load_dataset(
                self._name, self._config, split=self._split, streaming=True, trust_remote_code=False
            )
            self._data = split_dataset_by_node(data, rank=self._shard.rank, world_size=self._shard.world)
        except Exception as error:  # the library raises many unrelated types for one cause: it is not there
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f'dataset "{self._name}" (split {self._split}) cannot be opened: {reason}') from None
        if start is not None:
            self._data.load_state_dict(start)
        self._rows: Iterator[Any] = iter(self._data)

    def _fetch(self) -> None:
        """Step to the next document, over the end of the dataset if need be."""
        start = copy.deepcopy(self._data.state_dict())
        row = next(self._rows, None)
        if row is None:
            if self._start is None:
                raise UserError(f'dataset "{self._name}" is empty; choose another split')
            self._open(None)
            self._epoch += 1
            start = copy.deepcopy(self._data.state_dict())
            row = next(self._rows)
        if not isinstance(row.get(self._column), str):
            raise UserError(f'dataset "{self._name}" has no text column "{self._column}"; it has {", ".join(row)}')
        self._start, self._offset = start, 0
        self._tokens = self._encode(row[self._column])

    def next(self) -> TokenSequence:
        """Return the next sequence; every token of it is labelled."""
        parts: list[Ints] = []
        starts: list[int] = []
        missing = self._length
        while missing:
            rest = self._tokens[self._offset :]
            if not len(rest):
                self._fetch()
                if not self._given and self._epoch:
                    raise UserError(f"the data has fewer tokens than the context_length {self._length}; shorten it")
                continue
            if not self._offset:
                starts.append(self._length - missing)
            parts.append(rest[:missing])
            self._offset += len(parts[-1])
            missing -= len(parts[-1])
        self._given += 1
        ids = np.concatenate(parts)
        return TokenSequence(ids, ids, f"{self._name} sequence {self._given - 1}", tuple(starts))

    def position(self) -> dict[str, Any]:
        """Return the place of the current document in the stream and what has been used of it."""
        return {"index": self._given, "epoch": self._epoch, "start": self._start, "offset": self._offset}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from `position`; the current document is fetched again."""
        self._tokens = np.empty(0, np.int64)
        self._open(position["start"])
        if position["start"] is not None:
            self._fetch()
        self._given, self._epoch, self._offset = position["index"], position["epoch"], position["offset"]
