"""Endless sources of training sequences; each can be put back to any place from a few numbers.

Sequences belong to rows of the global batch: row g of the batch of all processes reads from lanes of its own, so that
the order of the data is the same however many processes share the rows, and no process reads for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.training.corpora.base import Corpus, Document, Place
from longrecall.training.encoding import Encoder, Ints

LANES, LANES_PER_ROW = 48, 3
"""Places of a corpus that are read side by side, and of them by one row in turn, at least: neighbouring sequences of a
batch, and of a row, come from different texts."""
ROW_GROUP_LANES, ROW_GROUP_LANES_PER_ROW = 24, 2
"""The same for parquet, where every lane keeps a file open."""
NOT_BEGUN = -1
_BEGINNING = (0, 0, None, NOT_BEGUN)

ORDER_STREAM = 1
TASK_STREAM = 2
"""Last part of the keys of random generators; `training.data` has 3, the initial states the next ones."""

_GROUP_CHARACTERS = 16 * 1024
_GROUP_DOCUMENTS = 64
"""At most so many documents are tokenised at once."""
_CHARACTERS_PER_TOKEN = 4
_DRAWN_WHOLE = 1 << 16
"""Chunks up to which an order is drawn as a list; beyond, any place of it is computed alone."""


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence: `input_ids` and `labels` int64 ``[T]`` (-100 = no loss), and where it came from."""

    input_ids: Ints
    labels: Ints
    origin: str
    starts: tuple[int, ...] = (0,)
    """Columns where documents start; without 0 the sequence goes on in a document that began before it."""


def random_generator(*key: int) -> np.random.Generator:
    """Return the generator that belongs to `key`: the same on every platform, unrelated for unequal keys."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


class Order:
    """A random order of the numbers 0 to n - 1; of a long one any place is computed by itself, without memory for it.

    The latter is a Feistel network: four rounds mix the halves of a number of 2k bits, which is a permutation of all of
    them, whatever the mixing; a result of n or more is sent through again.
    """

    def __init__(self, n: int, *key: int) -> None:
        generator = random_generator(*key, ORDER_STREAM)
        self._n = n
        self._list = generator.permutation(n) if n <= _DRAWN_WHOLE else None
        self._half = ((n - 1).bit_length() + 1) // 2
        self._keys = [int(value) for value in generator.integers(0, 1 << 62, 4)]

    def __getitem__(self, place: int) -> int:
        if self._list is not None:
            return int(self._list[place])
        low = (1 << self._half) - 1
        while True:
            left, right = place >> self._half, place & low
            for key in self._keys:
                mixed = ((right + key) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
                mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ (mixed >> 32) & low
            place = left << self._half | right
            if place < self._n:
                return place


class _Lane:
    """One reader of a corpus: its share of the chunks, in a new order every epoch, joined and cut into sequences.

    Chunks are dealt to the lanes. With fewer chunks than lanes several read the same one: of a stream each takes every
    k-th document; otherwise each walks through all chunks, from a place of its own. A lane that finds no document in
    its share (few and long ones) walks as well.
    """

    def __init__(self, source: CorpusSource, lane: int) -> None:
        self._source, self._lane = source, lane
        self.restore(_BEGINNING)

    def position(self) -> list[Any]:
        """Return epoch, turn in it, place of the document in the chunk, tokens used of it."""
        return [self._epoch, self._turn, self._place, self._offset]

    def restore(self, position: Sequence[Any]) -> None:
        """Continue from a position."""
        self._epoch, self._turn, self._place, self._offset = position
        self._found = self._offset != NOT_BEGUN
        """Whether this epoch has given a document."""
        self._close()

    def _close(self) -> None:
        self._reader: Iterator[tuple[Place, Document]] | None = None
        self._waiting: list[tuple[Place, NDArray[Any]]] = []
        """Tokenised documents, the current one first."""

    def chunk(self) -> int:
        """Return the chunk that is being read."""
        source, count = self._source, len(self._source.corpus)
        order, own = source.order(self._epoch), self._own_turns()
        if self._turn >= own or self._walks_always():
            return order[(source.starts[self._lane] + self._turn) % count]
        return order[(self._lane + self._turn * source.lanes) % count]

    def _shares(self) -> bool:
        return len(self._source.corpus) < self._source.lanes

    def _walks_always(self) -> bool:
        return self._shares() and not self._source.corpus.streamed

    def _own_turns(self) -> int:
        """Return how many chunks of an epoch are this lane's."""
        count, lanes = len(self._source.corpus), self._source.lanes
        if self._shares():
            return 1 if self._source.corpus.streamed else count
        return (count - self._lane + lanes - 1) // lanes

    def _turns(self) -> int:
        """Return the turns of this epoch: without a document in its own, the lane walks through all chunks."""
        own = self._own_turns()
        return own if self._found else own + len(self._source.corpus)

    def _open(self) -> Iterator[tuple[Place, Document]]:
        """Return what is left of the current chunk, from the current place on."""
        corpus, lanes = self._source.corpus, self._source.lanes
        count, chunk, part, parts = len(corpus), self.chunk(), 0, 1
        if self._shares() and corpus.streamed and self._turn < self._own_turns():
            first = self._lane % count
            parts = (lanes - first + count - 1) // count
            part = (self._lane // count + self._epoch) % parts
        if self._offset == NOT_BEGUN and self._walks_always():
            # Readers of the same chunk would otherwise all give the same sequences.
            self._place = corpus.size(chunk) * self._source.starts[self._lane] // lanes
        return corpus.read(chunk, self._place, part, parts)

    def _first_offset(self, place: Place, tokens: NDArray[Any]) -> int:
        """Return how many tokens of the first document of all are left out."""
        lanes, start = self._source.lanes, self._source.starts[self._lane]
        if self._turn >= self._own_turns():
            return len(tokens) * (start + 1) // (lanes + 1)  # one lane has it as its own, from the start
        if not self._walks_always():
            return 0
        first, share = divmod(self._source.corpus.size(self.chunk()) * start, lanes)
        return len(tokens) * share // lanes if place == first else 0

    def _next_chunk(self) -> None:
        self._close()
        self._place = None
        self._turn += 1
        if self._offset == NOT_BEGUN and self._walks_always():
            self._offset = 0
        if self._turn >= self._turns():
            if not self._found:
                raise UserError(f"{self._source.corpus.describe(self.chunk())}: no document left; the data has changed")
            self._turn, self._found = 0, False
            self._epoch += 1

    def _fill(self) -> None:
        """Tokenise the next documents; there may be none left in this chunk."""
        if self._reader is None:
            self._reader = self._open()
        places: list[Place] = []
        texts: list[str] = []
        characters = 0
        for place, document in self._reader:
            if not isinstance(document, str):
                self._waiting = [(place, document)]
                return
            places.append(place)
            texts.append(document)
            characters += len(document)
            if characters >= self._source.group_characters or len(texts) >= _GROUP_DOCUMENTS:
                break
        self._waiting = list(zip(places, self._source.encode(texts), strict=True)) if texts else []

    def _rest(self) -> NDArray[Any]:
        """Return the unread tokens of the current document, which is the next one with any."""
        while True:
            if not self._waiting:
                self._fill()
                if not self._waiting:
                    self._next_chunk()
                    continue
            place, tokens = self._waiting[0]
            if self._offset == NOT_BEGUN:
                self._offset = self._first_offset(place, tokens)
            self._place, self._found = place, True
            if self._offset < len(tokens):
                return tokens[self._offset :]
            self._offset = 0
            self._waiting.pop(0)

    def take(self, length: int) -> TokenSequence:
        """Return the next `length` tokens, every one labelled, with the place of the first."""
        parts: list[NDArray[Any]] = []
        starts: list[int] = []
        missing, origin = length, ""
        while missing:
            rest = self._rest()
            origin = origin or self._source.corpus.describe(self.chunk())
            if not self._offset:
                starts.append(length - missing)
            parts.append(rest[:missing])
            self._offset += len(parts[-1])
            missing -= len(parts[-1])
        ids = np.concatenate(parts).astype(np.int64, copy=False)
        return TokenSequence(ids, ids, origin, tuple(starts))


def lanes_for(rows: int, lanes: int, least: int) -> int:
    """Return how many lanes `rows` rows read: about `lanes`, a multiple of `rows`, and `least` a row or more.

    Where it can be, it is `lanes` times a power of two, so that most batch sizes have the same lanes.
    """
    most = max(lanes, 8 * least * rows)
    doubled = itertools.takewhile(lambda count: count <= most, (lanes << power for power in itertools.count()))
    fitting = (count for count in doubled if count % rows == 0 and count >= least * rows)
    return next(fitting, rows * max(least, -(-lanes // rows)))


class CorpusSource:
    """Sequences of `length` tokens from a corpus, sequence n from lane n modulo the number of lanes.

    Each row of the global batch reads `lanes_per_row` lanes in turn, and no other row reads them. Two batch sizes with
    the same number of lanes (`lanes_for`) give the same sequences in the same order.

    Every epoch of a lane has a new order. The lanes read disjoint chunks as long as there are enough of them.

    Args:
        seed: of the order.
        number: of the source in the recipe.
        rows: rows of the global batch that read this source.
        lanes: places that are read side by side, and of them by one row, at least; of a stream a row has one.

    Raises:
        UserError: the corpus has fewer than `length` tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        encode: Encoder,
        length: int,
        seed: int,
        number: int,
        rows: int,
        lanes: tuple[int, int] = (LANES, LANES_PER_ROW),
    ) -> None:
        self.corpus, self.encode = corpus, encode
        self._length, self._key = length, (seed, number)
        _check_enough(corpus, encode, length)
        self._rows = rows
        self.lanes = rows if corpus.streamed else lanes_for(rows, *lanes)
        self.lanes_per_row = self.lanes // rows
        self.starts = Order(self.lanes, *self._key)
        """Where lanes that share the chunks begin: neighbouring ones far from each other."""
        self.group_characters = max(_GROUP_CHARACTERS, _CHARACTERS_PER_TOKEN * length)
        self._open: dict[int, _Lane] = {}
        self._orders: dict[int, Order] = {}

    def order(self, epoch: int) -> Order:
        """Return the order of the chunks in an epoch."""
        if epoch not in self._orders:
            if len(self._orders) > 2:
                self._orders.pop(min(self._orders))
            self._orders[epoch] = Order(len(self.corpus), *self._key, epoch)
        return self._orders[epoch]

    def lane_of(self, row: int, batch: int) -> int:
        """Return the lane that row `row` of this source's rows reads in batch number `batch`."""
        return batch % self.lanes_per_row * self._rows + row

    def lanes_of(self, row: int) -> range:
        """Return all lanes of a row."""
        return range(row, self.lanes, self._rows)

    def next_of(self, lane: int) -> TokenSequence:
        """Return the next sequence of one lane; every token of it is labelled."""
        return self._lane(lane).take(self._length)

    def _lane(self, lane: int) -> _Lane:
        return self._open.setdefault(lane, _Lane(self, lane))

    def position_of(self, lane: int) -> list[Any]:
        """Return where a lane stands, as JSON data."""
        return self._lane(lane).position()

    def restore(self, positions: Mapping[int, Sequence[Any]]) -> None:
        """Put lanes to their positions, and all others to their beginnings."""
        self._open = {}
        for lane, position in positions.items():
            self._lane(lane).restore(position)


def _check_enough(corpus: Corpus, encode: Encoder, length: int) -> None:
    tokens = 0
    for chunk in range(len(corpus)):
        for _, document in corpus.read(chunk):
            tokens += len(encode([document])[0] if isinstance(document, str) else document)
            if tokens >= length:
                return
    raise UserError(
        f"the data has only {tokens} tokens, fewer than the context_length {length}; shorten the context or add data"
    )


class TaskSource:
    """Sequences that a task makes on the fly; number n of the run depends on the seed and n alone.

    Args:
        make: (generator, length) -> (input_ids, labels), int64 ``[length]`` each.
        seed: of all sequences.
        number: of the source in the recipe.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[np.random.Generator, int], tuple[Ints, Ints]],
        length: int,
        seed: int,
        number: int,
    ) -> None:
        self._name, self._make, self._length, self._key = name, make, length, (seed, number)
        # A context that cannot hold the task shows here, before the run starts.
        self._make(random_generator(0), length)

    def sequence(self, number: int) -> TokenSequence:
        """Return sequence `number` of the run, labelled as the task says."""
        ids, labels = self._make(random_generator(*self._key, number, TASK_STREAM), self._length)
        return TokenSequence(ids, labels, f"{self._name} sample {number}")
