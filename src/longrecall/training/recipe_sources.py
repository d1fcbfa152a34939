"""The data sources that a recipe can name, one dataclass a kind, and the checks that all sections share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from longrecall.errors import UserError, did_you_mean


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f'{name} "{value}" is none of {", ".join(choices)}.{did_you_mean(value, choices)}')


def positive(section: Any, *names: str) -> None:
    """Raise UserError unless these fields of a section are finite and above 0."""
    for name in names:
        if not getattr(section, name) > 0 or not math.isfinite(getattr(section, name)):
            raise UserError(f"{name} must be above 0, got {getattr(section, name)}")


def share(section: Any, *names: str) -> None:
    """Raise UserError unless these fields of a section lie in [0, 1]."""
    for name in names:
        if not 0.0 <= getattr(section, name) <= 1.0:
            raise UserError(f"{name} must be a share between 0 and 1, got {getattr(section, name)}")


@dataclass(frozen=True)
class SourceRecipe:
    """What every source of sequences has."""

    kind: ClassVar[str] = ""

    def _check_weight(self, weight: float) -> None:
        if not weight > 0 or not math.isfinite(weight):
            raise UserError(f"weight must be above 0, got {weight}; leave a source out to switch it off")


@dataclass(frozen=True)
class TextSource(SourceRecipe):
    """Plain text, UTF-8; documents end at a form feed (0x0c) and at the end of a file."""

    kind: ClassVar[str] = "text"

    path: str
    """A file, a folder (its *.txt files) or a glob."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)


@dataclass(frozen=True)
class JsonlSource(SourceRecipe):
    """One JSON object a line."""

    kind: ClassVar[str] = "jsonl"

    path: str
    """A file, a folder (its *.jsonl files) or a glob."""
    field: str = "text"
    """The key that holds the document."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)


@dataclass(frozen=True)
class ParquetSource(SourceRecipe):
    """Parquet files, read one row group at a time."""

    kind: ClassVar[str] = "parquet"

    path: str
    """A file, a folder (its *.parquet files) or a glob."""
    column: str = "text"
    """The column that holds the documents."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)


@dataclass(frozen=True)
class HubSource(SourceRecipe):
    """A dataset of the Hugging Face hub (or whatever else `datasets.load_dataset` takes), streamed in stored order."""

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
        self._check_weight(self.weight)


@dataclass(frozen=True)
class PhonebookSource(SourceRecipe):
    """Dense recall text made on the fly: name -> number lines, then queries; only the queried numbers are labelled."""

    kind: ClassVar[str] = "phonebook"

    pairs: tuple[int, int] = (2, 16)
    """Fewest and most entries of a book; uniform between them."""
    letters: int = 2
    """Letters of a name."""
    digits: int = 2
    """Digits of a number."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)
        positive(self, "letters", "digits")
        if not 1 <= self.pairs[0] <= self.pairs[1]:
            raise UserError(f"pairs must be [fewest, most] with 1 <= fewest <= most, got {list(self.pairs)}")


@dataclass(frozen=True)
class PasskeySource(SourceRecipe):
    """Passkey prompts made on the fly; only the key is labelled."""

    kind: ClassVar[str] = "passkey"

    digits: int = 5
    """Digits of the key."""
    form: str = "statex"
    """statex or infinitebench."""
    label_needle: bool = False
    """Also label the key's second mention inside the needle."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)
        positive(self, "digits")
        one_of("form", self.form, ("statex", "infinitebench"))


@dataclass(frozen=True)
class CopyingSource(SourceRecipe):
    """Random strings, each followed by its copy; only the copies are labelled."""

    kind: ClassVar[str] = "copying"

    lengths: tuple[int, int] = (5, 20)
    """Fewest and most letters of a string; uniform between them."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)
        if not 1 <= self.lengths[0] <= self.lengths[1]:
            raise UserError(f"lengths must be [fewest, most] with 1 <= fewest <= most, got {list(self.lengths)}")


@dataclass(frozen=True)
class BabilongSource(SourceRecipe):
    """Stories told among the sentences of a book, then questions; only the answers are labelled."""

    kind: ClassVar[str] = "babilong"

    tasks: tuple[str, ...] = ("qa1", "qa2", "qa3", "qa4", "qa5")
    """Types of story, equally likely."""
    questions: int = 1
    """Questions about a story."""
    path: str | None = None
    """A UTF-8 text file, the book; none = the one that ships."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        self._check_weight(self.weight)
        positive(self, "questions")
        if not self.tasks:
            raise UserError("tasks is empty; name at least one")
        for task in self.tasks:
            one_of("tasks", task, ("qa1", "qa2", "qa3", "qa4", "qa5"))


TaskRecipe = PhonebookSource | PasskeySource | CopyingSource | BabilongSource
"""Sources that are made on the fly."""
AnySource = TextSource | JsonlSource | ParquetSource | HubSource | TaskRecipe
SOURCES: dict[str, type] = {
    source.kind: source
    for source in (
        TextSource,
        JsonlSource,
        ParquetSource,
        HubSource,
        PhonebookSource,
        PasskeySource,
        CopyingSource,
        BabilongSource,
    )
}
