"""The data sources that a recipe can name, one dataclass a kind. Tasks declare theirs in their own files."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from longrecall.tasks.declaration import TrainingSource
from longrecall.tasks.registry import TRAINING_SOURCES
from longrecall.value_rules import check_weight


@dataclass(frozen=True)
class TextSource:
    """Plain text, UTF-8; documents end at a form feed (0x0c) and at the end of a file."""

    kind: ClassVar[str] = "text"

    path: str
    """A file, a folder (its *.txt files) or a glob."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True)
class JsonlSource:
    """One JSON object a line."""

    kind: ClassVar[str] = "jsonl"

    path: str
    """A file, a folder (its *.jsonl files, or *.jsonl.zst, *.jsonl.gz) or a glob; a compressed file is a stream."""
    field: str = "text"
    """The key that holds the document."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files, read one row group at a time."""

    kind: ClassVar[str] = "parquet"

    path: str
    """A file, a folder (its *.parquet files) or a glob."""
    column: str = "text"
    """The column that holds the documents."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True)
class TokensSource:
    """Documents that `longrecall tokenize` has made tokens of, with the checkpoint's tokenizer."""

    kind: ClassVar[str] = "tokens"

    path: str
    """The folder that it wrote."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True)
class HubSource:
    """A dataset of the Hugging Face hub (or whatever else `datasets.load_dataset` takes), streamed by its shards."""

    kind: ClassVar[str] = "hub"

    name: str
    """`org/name`, or a local folder of data files."""
    config: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    """Split of the dataset."""
    column: str = "text"
    """The column that holds the documents."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


FileSource = TextSource | JsonlSource | ParquetSource
AnySource = FileSource | TokensSource | HubSource | TrainingSource
_READ: dict[str, type] = {
    source.kind: source for source in (TextSource, JsonlSource, ParquetSource, TokensSource, HubSource)
}
SOURCES: Mapping[str, type] = ChainMap(TRAINING_SOURCES, _READ)
"""What a recipe calls a source -> its dataclass: those that are read, then those that the registered tasks make."""
