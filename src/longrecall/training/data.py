"""The stream of training batches: sources, mixed by weight, that continue exactly where a checkpoint left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from longrecall.errors import UserError
from longrecall.tasks.declaration import TrainingSource
from longrecall.tasks.encoding import PieceEncoder
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
    TokenSequence,
    random_generator,
)

MIN_CHUNK_BYTES = 16 * 1024
CHUNK_BYTES_PER_TOKEN = 64
"""A chunk holds many sequences, so that joins between chunks stay rare, and few enough to keep 64 of them in memory."""
MIXTURE_STREAM = 3
TEXTS = (recipes.TextSource, recipes.JsonlSource, recipes.ParquetSource)
"""Sources whose documents a row can read from start to end."""

Batch = dict[str, Any]
"""`input_ids`, `labels` int64 ``[B, T]``; `text` bool ``[B]``: running text, not a task; `starts`: for each row the
columns where documents start; `origin`: where each row is from; `first`: number of its first sequence."""


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
        continued: row i of a batch goes on in the text that row i of the batch before was reading. Every row belongs to
            one source of text; tasks are still drawn by weight and only make its text wait.

    Raises:
        UserError: a source is missing, empty, not UTF-8, too short for the context, or malformed; with `continued`
            also one that cannot be read by rows, or no text at all.
    """

    def __init__(
        self,
        recipe: DataRecipe,
        tokenizer: Any,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        *,
        continued: bool = False,
    ) -> None:
        self._batch_size, self._seed, self._rank = batch_size, recipe.seed, rank
        self.context_length = recipe.context_length
        weights = np.array([source.weight for source in recipe.sources], dtype=np.float64)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._rows = assign_rows(recipe.sources, batch_size) if continued else None
        self._sources: list[SequenceSource] = []
        for index, source in enumerate(recipe.sources):
            shard = Shard(recipe.seed, index, rank, world)
            rows = None if self._rows is None else sum(owner == index for owner, _ in self._rows)
            try:
                self._sources.append(open_source(source, tokenizer, recipe.context_length, shard, rows))
            except UserError as error:
                raise UserError(f"data.sources.{index} ({source.kind}): {error}") from None
        self._sequence = 0

    def next_batch(self) -> Batch:
        """Return the next batch."""
        rows, text, first = [], [], self._sequence
        for row in range(self._batch_size):
            draw = random_generator(self._seed, self._rank, self._sequence, MIXTURE_STREAM).random()
            # The last cumulative weight can fall short of 1 by rounding.
            source = min(int(np.searchsorted(self._cumulative, draw, side="right")), len(self._sources) - 1)
            is_text = not isinstance(self._sources[source], TaskSource)
            rows.append(self._next_of_row(row) if is_text and self._rows else self._sources[source].next())
            text.append(is_text)
            self._sequence += 1
        return {
            "input_ids": torch.from_numpy(np.stack([row.input_ids for row in rows])),
            "labels": torch.from_numpy(np.stack([row.labels for row in rows])),
            "text": torch.tensor(text),
            "starts": [row.starts for row in rows],
            "origin": [row.origin for row in rows],
            "first": first,
        }

    def _next_of_row(self, row: int) -> TokenSequence:
        owner, lane = (self._rows or [])[row]
        source = self._sources[owner]
        if not isinstance(source, CorpusSource):
            raise RuntimeError("a row belongs to a source that has lanes")
        return source.next_of(lane)

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


def assign_rows(sources: Sequence[AnySource], batch_size: int) -> list[tuple[int, int]]:
    """Return for each row of a batch the source of text that it reads, and which of that source's rows it is.

    The rows are shared out by the weights of the sources of text: row i goes to the source that covers (i + 1/2) / B.

    Raises:
        UserError: no source of text; a hub dataset, which is one stream; a source whose weight gives it no row.
    """
    texts = [i for i, source in enumerate(sources) if isinstance(source, TEXTS)]
    for index, source in enumerate(sources):
        if isinstance(source, recipes.HubSource):
            raise UserError(
                f"data.sources.{index} (hub): a hub dataset is one stream, which the rows of a batch cannot each read "
                "on their own; download it as parquet or jsonl, or use initial_state.kind=state_passing"
            )
    if not texts:
        kinds = ", ".join(dict.fromkeys(source.kind for source in sources))
        raise UserError(
            f"data.sources: {kinds} cannot continue from batch to batch, every sequence is complete; add a source of "
            "text (text, jsonl, parquet), or use another initial_state.kind than truncated_bptt"
        )
    weights = np.array([sources[i].weight for i in texts], dtype=np.float64)
    places = (np.arange(batch_size) + 0.5) / batch_size
    found = np.searchsorted(np.cumsum(weights / weights.sum()), places, side="right").clip(max=len(texts) - 1)
    for number, index in enumerate(texts):
        if number not in found:
            raise UserError(
                f"data.sources.{index} ({sources[index].kind}): its weight gives it none of the {batch_size} rows of a "
                "batch; raise the weight or run.batch_size"
            )
    owners = [texts[number] for number in found]
    return [(owner, owners[:row].count(owner)) for row, owner in enumerate(owners)]


def open_source(
    source: AnySource, tokenizer: Any, length: int, shard: Shard, rows: int | None = None
) -> SequenceSource:
    """Return the stream that a source of the recipe describes; `rows`: text read by so many rows (`CorpusSource`)."""
    if isinstance(source, TrainingSource):
        return TaskSource(source.kind, source.sequences(PieceEncoder(tokenizer)), length, shard)
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
    return CorpusSource(corpus, encode, length, shard, lanes, rows)
