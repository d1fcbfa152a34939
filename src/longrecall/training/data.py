"""The stream of training batches: sources, mixed by weight, that continue exactly where a checkpoint left them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from longrecall.errors import UserError
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.passkey import passkey_sequence
from longrecall.tasks.phonebook import phonebook_sequence
from longrecall.training import recipe_sources as recipes
from longrecall.training.corpus import Corpus, JsonlCorpus, ParquetCorpus, TextCorpus, find_files
from longrecall.training.recipe import DataRecipe
from longrecall.training.recipe_sources import AnySource
from longrecall.training.sources import (
    LANES,
    ROW_GROUP_LANES,
    CorpusSource,
    HubSource,
    SequenceSource,
    Shard,
    TaskSource,
    random_generator,
)

MIN_CHUNK_BYTES = 16 * 1024
CHUNK_BYTES_PER_TOKEN = 64
"""A chunk holds many sequences, so that joins between chunks stay rare, and few enough to keep 64 of them in memory."""
MIXTURE_STREAM = 3

Batch = dict[str, Any]
"""`input_ids`, `labels` int64 ``[B, T]``; `text` bool ``[B]``: running text, not a task; `origin`: where each row is
from; `first`: number of its first sequence."""


class DocumentEncoder:
    """A tokenizer as text -> ids with the end token last.

    Raises:
        UserError: the tokenizer has no end token.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the checkpoint's tokenizer has no end token (eos_token), which joins documents; set one")
        self._tokenizer, self._end = tokenizer, int(tokenizer.eos_token_id)

    def __call__(self, document: str) -> NDArray[np.int64]:
        """Return int64 ``[n + 1]``."""
        ids = self._tokenizer.encode(document, add_special_tokens=False)
        return np.array([*ids, self._end], dtype=np.int64)


class BatchStream(IterableDataset[Batch]):
    """Endless batches of the mixture for one process.

    Which source gives the next sequence is drawn from a generator that depends on (seed, process, sequence number)
    alone; `position` is small JSON data and `restore` continues from it with the very same batches.

    Args:
        recipe: the data section.
        tokenizer: of the checkpoint.
        batch_size: rows B of a batch.
        rank, world: this process and the number of processes; each reads its own share.

    Raises:
        UserError: a source is missing, empty, not UTF-8, too short for the context, or malformed.
    """

    def __init__(self, recipe: DataRecipe, tokenizer: Any, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self._batch_size, self._seed, self._rank = batch_size, recipe.seed, rank
        self.context_length = recipe.context_length
        weights = np.array([source.weight for source in recipe.sources], dtype=np.float64)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._sources: list[SequenceSource] = []
        for index, source in enumerate(recipe.sources):
            shard = Shard(recipe.seed, index, rank, world)
            try:
                self._sources.append(open_source(source, tokenizer, recipe.context_length, shard))
            except UserError as error:
                raise UserError(f"data.sources.{index} ({source.kind}): {error}") from None
        self._sequence = 0

    def next_batch(self) -> Batch:
        """Return the next batch."""
        rows, text, first = [], [], self._sequence
        for _ in range(self._batch_size):
            draw = random_generator(self._seed, self._rank, self._sequence, MIXTURE_STREAM).random()
            # The last cumulative weight can fall short of 1 by rounding.
            source = min(int(np.searchsorted(self._cumulative, draw, side="right")), len(self._sources) - 1)
            rows.append(self._sources[source].next())
            text.append(not isinstance(self._sources[source], TaskSource))
            self._sequence += 1
        return {
            "input_ids": torch.from_numpy(np.stack([row.input_ids for row in rows])),
            "labels": torch.from_numpy(np.stack([row.labels for row in rows])),
            "text": torch.tensor(text),
            "origin": [row.origin for row in rows],
            "first": first,
        }

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def position(self) -> dict[str, Any]:
        """Return where the stream stands, as JSON data."""
        return {"sequence": self._sequence, "sources": [source.position() for source in self._sources]}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from a position of a stream with the same recipe and data."""
        if len(position["sources"]) != len(self._sources):
            raise UserError("the recipe has other data sources than the checkpoint was trained with")
        self._sequence = position["sequence"]
        for source, place in zip(self._sources, position["sources"], strict=True):
            source.restore(place)


def open_source(source: AnySource, tokenizer: Any, length: int, shard: Shard) -> SequenceSource:
    """Return the stream that a source of the recipe describes."""
    if isinstance(source, recipes.PhonebookSource):
        pieces, book = PieceEncoder(tokenizer), source
        return TaskSource(
            "phonebook",
            lambda generator, size: phonebook_sequence(generator, pieces, size, book.pairs, book.letters, book.digits),
            length,
            shard,
        )
    if isinstance(source, recipes.PasskeySource):
        pieces, key = PieceEncoder(tokenizer), source
        return TaskSource(
            "passkey",
            lambda generator, size: passkey_sequence(generator, pieces, size, key.digits, key.form, key.label_needle),
            length,
            shard,
        )
    encode = DocumentEncoder(tokenizer)
    if isinstance(source, recipes.HubSource):
        return HubSource(source.name, source.config, source.split, source.column, encode, length, shard)
    chunk_bytes = max(MIN_CHUNK_BYTES, CHUNK_BYTES_PER_TOKEN * length)
    files = find_files(source.path, {"text": ".txt"}.get(source.kind, f".{source.kind}"), "path")
    corpus: Corpus
    if isinstance(source, recipes.TextSource):
        corpus = TextCorpus(files, chunk_bytes)
    elif isinstance(source, recipes.JsonlSource):
        corpus = JsonlCorpus(files, chunk_bytes, source.field)
    else:
        corpus = ParquetCorpus(files, source.column)
    lanes = ROW_GROUP_LANES if isinstance(source, recipes.ParquetSource) else LANES
    return CorpusSource(corpus, encode, length, shard, lanes)
