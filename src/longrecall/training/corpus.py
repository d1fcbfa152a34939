"""Files as numbered chunks of documents: any chunk can be read alone, so that order and position are a few numbers."""

from __future__ import annotations

import io
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.installing import install_command

DOCUMENT_END = b"\x0c"
CHECK_AHEAD = 1 << 30
"""Bytes of a JSON-lines file up to which every line is parsed before the run starts; larger files as they are read."""


class Corpus(Protocol):
    """Documents in numbered chunks, small enough to hold one in memory."""

    def __len__(self) -> int:
        """Number of chunks."""

    def read(self, chunk: int) -> Sequence[str]:
        """Return the documents of one chunk in order."""

    def describe(self, chunk: int) -> str:
        """Say where a chunk stands, for messages."""


def find_files(path: str, suffix: str, key: str) -> list[Path]:
    """Return the files that `path` means (a file, a folder, a glob), sorted; UserError when there is none."""
    place = expand_home(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(file for file in place.iterdir() if file.is_file() and file.suffix == suffix)
        wanted = f"{place} has no *{suffix} files"
    else:
        pattern = Path(*place.parts[1:]) if place.is_absolute() else place
        magic = any(character in path for character in "*?[")
        root = Path(place.anchor) if place.is_absolute() else Path()
        found = sorted(file for file in root.glob(str(pattern)) if file.is_file()) if magic else []
        wanted = f"no file matches {place}" if magic else f"there is no file or folder {place}"
    if not found:
        raise UserError(f"{key}: {wanted}; give an existing file, folder or pattern")
    return found


@dataclass(frozen=True)
class _Span:
    file: int
    start: int
    end: int
    line: int


class TextCorpus:
    """UTF-8 text. Small documents share a chunk; one longer than `chunk_bytes` is cut where a paragraph or line ends.

    Files are read once, in order, to find the chunks and check the encoding; what stays in memory is the list of spans.

    Raises:
        UserError: a file that is empty or not UTF-8 (with the byte offset).
    """

    def __init__(self, files: Sequence[Path], chunk_bytes: int) -> None:
        self._files = list(files)
        spans = [
            (index, start, end)
            for index, path in enumerate(self._files)
            for start, end in _text_spans(path, chunk_bytes)
        ]
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, chunk: int) -> Sequence[str]:
        """Return the documents (or the piece of one) in this chunk, without their form feeds."""
        file, start, end = (int(value) for value in self._spans[chunk])
        documents = _read_bytes(self._files[file], start, end).split(DOCUMENT_END)
        return [_decode(part, self._files[file], start) for part in documents if part.strip()]

    def describe(self, chunk: int) -> str:
        file, start, end = (int(value) for value in self._spans[chunk])
        return f"{self._files[file]} bytes {start}-{end}"


def _text_spans(path: Path, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    with _Mapped(path) as data:
        size, start, found = len(data), 0, False
        if data[:3] == b"\xef\xbb\xbf":
            start = 3
        while start < size:
            end = size if start + chunk_bytes >= size else _cut(data, start, start + chunk_bytes)
            text = data[start:end]
            _decode(text, path, start)
            if text.strip(b" \t\r\n\x0c"):
                found = True
                yield start, end
            start = end
        if not found:
            raise UserError(f"{path} is empty; give a file with text in it")


def _cut(data: mmap.mmap, start: int, end: int) -> int:
    """Return where in (start, end] to cut: after a document, else a paragraph, a line, a word, a character."""
    document = data.rfind(DOCUMENT_END, start + 1, end)
    if document >= 0:
        return document + 1
    for mark in (b"\n\n", b"\n", b" "):
        place = data.rfind(mark, start + (end - start) // 2, end)
        if place >= 0:
            return place + len(mark)
    # Bytes 10xxxxxx continue a character; a character has at most three of them.
    for back in range(4):
        if data[end - back] & 0xC0 != 0x80:
            return end - back
    return end


class JsonlCorpus:
    """One JSON object a line, the document under `key`; consecutive lines share a chunk of about `chunk_bytes`.

    Raises:
        UserError: an empty file, a line that is no JSON object with text under `key` (file and line number), not UTF-8.
    """

    def __init__(self, files: Sequence[Path], chunk_bytes: int, key: str) -> None:
        self._files, self._key = list(files), key
        spans = [
            (index, span.start, span.end, span.line)
            for index, path in enumerate(self._files)
            for span in self._scan(index, path, chunk_bytes)
        ]
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 4)

    def _scan(self, index: int, path: Path, chunk_bytes: int) -> list[_Span]:
        spans, line, start, first = [], 0, 0, 1
        with _Mapped(path) as data:
            check = len(data) <= CHECK_AHEAD
            place, size = 0, len(data)
            while place < size:
                newline = data.find(b"\n", place)
                end = size if newline < 0 else newline + 1
                line += 1
                if check:
                    self._document(data[place:end], path, line, place)
                if end - start >= chunk_bytes or end == size:
                    spans.append(_Span(index, start, end, first))
                    start, first = end, line + 1
                place = end
        return spans

    def _document(self, raw: bytes, path: Path, line: int, offset: int) -> str | None:
        text = _decode(raw, path, offset)
        if not text.strip():
            return None
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path} line {line} is not valid JSON: {error}; mend or remove it") from None
        if not isinstance(row, dict) or not isinstance(row.get(self._key), str):
            raise UserError(f'{path} line {line} is not a JSON object with text under "{self._key}"; set its field')
        return str(row[self._key])

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, chunk: int) -> Sequence[str]:
        """Return the documents of these lines; empty lines and empty texts are left out."""
        file, place, end, line = (int(value) for value in self._spans[chunk])
        raw = _read_bytes(self._files[file], place, end)
        documents = []
        for row in io.BytesIO(raw):
            document = self._document(row, self._files[file], line, place)
            place, line = place + len(row), line + 1
            if document:
                documents.append(document)
        return documents

    def describe(self, chunk: int) -> str:
        file, _, _, line = (int(value) for value in self._spans[chunk])
        return f"{self._files[file]} from line {line}"


class ParquetCorpus:
    """Parquet files; a chunk is a row group, of which only `column` is read. Needs pyarrow.

    Raises:
        UserError: pyarrow is missing, a file is no parquet, has no rows or no text column of this name.
    """

    def __init__(self, files: Sequence[Path], column: str) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"parquet needs pyarrow; install it with: {install_command('pyarrow')}") from None
        self._column = column
        self._opened: list[Any] = []
        self._names = list(files)
        self._spans: list[tuple[int, int]] = []
        for index, path in enumerate(files):
            try:
                opened = pyarrow.parquet.ParquetFile(path)
            except (pyarrow.ArrowException, OSError) as error:
                raise UserError(f"{path} is not a whole parquet file: {str(error).splitlines()[0]}") from None
            names = opened.schema_arrow.names
            if column not in names:
                raise UserError(f'{path} has no column "{column}"; it has {", ".join(names)}')
            kind = opened.schema_arrow.field(column).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(f'{path}: column "{column}" holds {kind}, not text')
            if not opened.metadata.num_rows:
                raise UserError(f"{path} is empty; give a file with rows in it")
            self._opened.append(opened)
            self._spans += [(index, group) for group in range(opened.num_row_groups)]

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, chunk: int) -> Sequence[str]:
        """Return the non-empty documents of one row group."""
        file, group = self._spans[chunk]
        values = self._opened[file].read_row_group(group, columns=[self._column]).column(0).to_pylist()
        return [value for value in values if value]

    def describe(self, chunk: int) -> str:
        file, group = self._spans[chunk]
        return f"{self._names[file]} row group {group}"


class _Mapped:
    """A read-only memory map of a file; UserError when it cannot be read or is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> mmap.mmap:
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {error.strerror or error}") from None
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            self._file.close()
            raise UserError(f"{self._path} is empty; give a file with text in it") from None
        return self._map

    def __exit__(self, *error: object) -> None:
        self._map.close()
        self._file.close()


def _read_bytes(path: Path, start: int, end: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(end - start)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) != end - start:
        raise UserError(f"{path} became shorter while it was read; training data must not change during a run")
    return raw


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        bad = raw[error.start]
        raise UserError(f"{path} is not UTF-8: byte 0x{bad:02x} at offset {place}; convert the file") from None
