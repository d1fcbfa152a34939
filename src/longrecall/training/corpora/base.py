"""What every corpus offers, and what those of files share: finding them, pieces of them by arithmetic, error lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.files import expand_home

Document = str | NDArray[np.generic]
"""Text, or token ids ``[n]`` with the end token last."""
Place = Any
"""Where a document stands in its chunk, as JSON data: its number, unless the corpus is `streamed`."""

CHECK_AHEAD = 1 << 28
"""Bytes of a source that are read and checked before the run starts; the rest is checked when it is read."""


class Corpus(Protocol):
    """Documents in numbered chunks."""

    @property
    def streamed(self) -> bool:
        """A chunk can only be read from its start, and how many documents it has shows at its end."""

    def __len__(self) -> int:
        """Number of chunks."""

    def size(self, chunk: int) -> int:
        """Places in a chunk, empty ones included; never asked of a corpus that is `streamed`."""

    def read(self, chunk: int, start: Place = None, part: int = 0, parts: int = 1) -> Iterator[tuple[Place, Document]]:
        """Give the documents of a chunk from the place `start` on (None: the first), each with its place.

        With `parts` > 1 only those whose number is `part` modulo `parts`. Empty documents are left out.

        Raises:
            UserError: the file cannot be read, is damaged or cut short; the line names it and the place.
        """

    def describe(self, chunk: int) -> str:
        """Say where a chunk stands, for messages."""

    def amount(self) -> list[int]:
        """Numbers that tell this data from other data: how many files, bytes or rows."""


def find_files(path: str, suffixes: str | tuple[str, ...], key: str) -> list[Path]:
    """Return the files that `path` means (a file, a folder, a glob), sorted; UserError when there is none."""
    place = expand_home(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(file for file in place.iterdir() if file.is_file() and file.name.endswith(suffixes))
        named = suffixes if isinstance(suffixes, str) else " or *".join(suffixes)
        wanted = f"{place} has no *{named} files"
    else:
        pattern = Path(*place.parts[1:]) if place.is_absolute() else place
        magic = any(character in path for character in "*?[")
        root = Path(place.anchor) if place.is_absolute() else Path()
        found = sorted(file for file in root.glob(str(pattern)) if file.is_file()) if magic else []
        wanted = f"no file matches {place}" if magic else f"there is no file or folder {place}"
    if not found:
        raise UserError(f"{key}: {wanted}; give an existing file, folder or pattern")
    return found


class Pieces:
    """Files as numbered pieces of `piece` bytes (or tokens) each: which piece is where is a matter of arithmetic.

    What a piece holds exactly is for the corpus to say: it moves the ends to where documents end.
    """

    def __init__(self, sizes: Sequence[int], piece: int) -> None:
        self.sizes, self.piece = list(sizes), piece
        counts = np.array([-(-size // piece) for size in sizes], dtype=np.int64)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, chunk: int) -> tuple[int, int, int]:
        """Return the file of a piece, and where it begins and ends in it."""
        file = int(np.searchsorted(self._ends, chunk, side="right"))
        first = int(self._ends[file - 1]) if file else 0
        start = (chunk - first) * self.piece
        return file, start, min(start + self.piece, self.sizes[file])

    def checked(self) -> range:
        """Return the pieces that are checked before a run starts: the first ones, `CHECK_AHEAD` bytes of them."""
        return range(min(len(self), -(-CHECK_AHEAD // self.piece)))


def file_sizes(files: Sequence[Path]) -> list[int]:
    """Return the bytes of every file; UserError for one that cannot be read or is empty."""
    sizes = []
    for path in files:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise unreadable(path, error) from None
        if not size:
            raise is_empty(path)
        sizes.append(size)
    return sizes


def read_bytes(path: Path, start: int, end: int) -> bytes:
    """Return the bytes [start, end) of a file; UserError when it is shorter than it was or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(end - start)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(raw) != end - start:
        raise UserError(
            f"{path} ends at byte {start + len(raw)} and was longer before; training data must not change during a run"
        )
    return raw


def decode(raw: bytes, path: Path, offset: int) -> str:
    """Return UTF-8 text that stands at `offset` of a file; UserError with the place of the first byte that is none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        bad = raw[error.start]
        raise UserError(f"{path} is not UTF-8: byte 0x{bad:02x} at offset {place}; convert the file") from None


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the line for a file that the system does not let anybody read."""
    return UserError(f"{path} cannot be read: {error.strerror or error}")


def is_empty(path: Path | str) -> UserError:
    """Return the line for a file without text."""
    return UserError(f"{path} is empty; give a file with text in it")
