"""What a recipe says of its data -> sources that are open: which files, in which chunks, and which rows read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.errors import UserError
from longrecall.tasks.declaration import TrainingSource
from longrecall.tasks.encoding import PieceEncoder
from longrecall.training import recipe_sources as recipes
from longrecall.training.corpora.base import Corpus, find_files
from longrecall.training.corpora.hub import HubCorpus
from longrecall.training.corpora.jsonl import CODECS, SUFFIXES, CompressedJsonlCorpus, JsonlCorpus
from longrecall.training.corpora.parquet import ParquetCorpus
from longrecall.training.corpora.text import TextCorpus
from longrecall.training.corpora.tokens import TokensCorpus
from longrecall.training.encoding import DocumentEncoder, tokenizer_fingerprint
from longrecall.training.recipe_sources import AnySource
from longrecall.training.sources import (
    LANES,
    LANES_PER_ROW,
    ROW_GROUP_LANES,
    ROW_GROUP_LANES_PER_ROW,
    CorpusSource,
    TaskSource,
)

MIN_CHUNK_BYTES = 16 * 1024
CHUNK_BYTES_PER_TOKEN = 64
"""A chunk holds many sequences, so that joins between chunks stay rare, and few enough to keep one of every lane."""
MIN_CHUNK_TOKENS = 4 * 1024
CHUNK_SEQUENCES = 16
"""The same for token files."""
ENDINGS: dict[str, tuple[str, ...]] = {"text": (".txt",), "jsonl": SUFFIXES, "parquet": (".parquet",)}
"""Kind of files -> how their names end, in a folder."""


def assign_rows(sources: Sequence[AnySource], rows: int) -> list[tuple[int, int]]:
    """Return for each row of the global batch the source of text that it reads, and which of that source's rows it is.

    The rows are shared out by the weights of the sources of text: row i goes to the source that covers (i + 1/2) / R.

    Raises:
        UserError: no source of text; a source whose weight gives it no row.
    """
    texts = [i for i, source in enumerate(sources) if not isinstance(source, TrainingSource)]
    if not texts:
        kinds = ", ".join(dict.fromkeys(source.kind for source in sources))
        raise UserError(
            f"data.sources: {kinds} cannot continue from batch to batch, every sequence is complete. Add a source of "
            "text (text, jsonl, parquet), or use another initial_state.kind than truncated_bptt"
        )
    weights = np.array([sources[i].weight for i in texts], dtype=np.float64)
    places = (np.arange(rows) + 0.5) / rows
    found = np.searchsorted(np.cumsum(weights / weights.sum()), places, side="right").clip(max=len(texts) - 1)
    for number, index in enumerate(texts):
        if number not in found:
            raise UserError(
                f"data.sources.{index} ({sources[index].kind}): its weight gives it none of the {rows} rows of a "
                "batch; raise the weight or run.batch_size"
            )
    given = [0] * len(sources)
    assigned = []
    for owner in (texts[number] for number in found):
        assigned.append((owner, given[owner]))
        given[owner] += 1
    return assigned


def open_source(
    source: AnySource, tokenizer: Any, length: int, seed: int, number: int, rows: int, continued: bool
) -> CorpusSource | TaskSource:
    """Return the stream that source `number` of the recipe describes; `rows` rows of the global batch read it."""
    if isinstance(source, TrainingSource):
        return TaskSource(source.kind, source.sequences(PieceEncoder(tokenizer)), length, seed, number)
    encode = DocumentEncoder(tokenizer)
    corpus: Corpus
    if isinstance(source, recipes.HubSource):
        corpus = HubCorpus(source.name, source.config, source.split, source.column)
    elif isinstance(source, recipes.TokensSource):
        chunk = max(MIN_CHUNK_TOKENS, CHUNK_SEQUENCES * length)
        corpus = TokensCorpus(source.path, chunk, tokenizer_fingerprint(tokenizer))
    else:
        corpus = open_files(source, source_files(source), max(MIN_CHUNK_BYTES, CHUNK_BYTES_PER_TOKEN * length))
    lanes = (LANES, LANES_PER_ROW)
    if continued:
        lanes = (rows, 1)
    elif isinstance(source, recipes.ParquetSource):
        lanes = (ROW_GROUP_LANES, ROW_GROUP_LANES_PER_ROW)
    return CorpusSource(corpus, encode, length, seed, number, rows, lanes)


def source_files(source: recipes.FileSource) -> list[Path]:
    """Return the files of a source, sorted."""
    return find_files(source.path, ENDINGS[source.kind], "path")


def open_files(source: recipes.FileSource, files: Sequence[Path], chunk_bytes: int) -> Corpus:
    """Return the documents of files of text; `chunk_bytes`: of a chunk, where they can be cut at will."""
    if isinstance(source, recipes.TextSource):
        return TextCorpus(files, chunk_bytes)
    if isinstance(source, recipes.ParquetSource):
        return ParquetCorpus(files, source.column)
    compressed = [file for file in files if file.suffix in CODECS]
    if not compressed:
        return JsonlCorpus(files, chunk_bytes, source.field)
    if len(compressed) < len(files):
        plain = next(file for file in files if file.suffix not in CODECS)
        raise UserError(f"path: {compressed[0]} is compressed and {plain} is not; make two sources of them")
    return CompressedJsonlCorpus(files, source.field)
