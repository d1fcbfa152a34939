"""One JSON object a line: plain files by pieces, compressed ones as streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from longrecall.errors import UserError
from longrecall.installing import install_command
from longrecall.training.corpora.base import Pieces, decode, file_sizes, is_empty, read_bytes, unreadable

CODECS = {".zst": "zstd", ".gz": "gzip"}
"""End of a file's name -> how it is compressed."""
SUFFIXES = (".jsonl", *(f".jsonl{end}" for end in CODECS))
_BLOCK = 1 << 20


class JsonlCorpus:
    """Lines of plain files, the document under `key`; a chunk holds the lines that start in `chunk_bytes` of a file.

    Raises:
        UserError: an empty file, a line that is no JSON object with text under `key` (file and line number), not UTF-8.
    """

    streamed = False

    def __init__(self, files: Sequence[Path], chunk_bytes: int, key: str) -> None:
        self._files, self._key = list(files), key
        self._pieces = Pieces(file_sizes(files), chunk_bytes)
        for chunk in self._pieces.checked():
            for _ in self.read(chunk):
                pass

    def __len__(self) -> int:
        return len(self._pieces)

    def _lines(self, chunk: int) -> tuple[Path, int, list[bytes]]:
        """Return the file, where the first line that starts in the chunk begins, and its lines."""
        file, start, end = self._pieces.locate(chunk)
        path = self._files[file]
        # The line at `p` starts after a line end at `p - 1`; the chunk's first byte may end the line before.
        raw = read_bytes(path, max(0, start - 1), end - 1)
        if start:
            newline = raw.find(b"\n")
            if newline < 0:
                return path, end, []
            start, raw = start + newline, raw[newline + 1 :]
        try:
            with path.open("rb") as opened:
                opened.seek(end - 1)
                raw += opened.readline()
        except OSError as error:
            raise unreadable(path, error) from None
        lines = raw.split(b"\n")
        return path, start, lines if lines[-1] else lines[:-1]

    def size(self, chunk: int) -> int:
        """Return the number of lines."""
        return len(self._lines(chunk)[2])

    def read(self, chunk: int, start: int | None = None, part: int = 0, parts: int = 1) -> Iterator[tuple[int, str]]:
        """Give the documents of these lines; empty lines and empty texts are left out."""
        path, place, lines = self._lines(chunk)
        for number, line in enumerate(lines):
            if number >= (start or 0) and number % parts == part:
                document = _document(line, self._key, path, place, None)
                if document:
                    yield number, document
            place += len(line) + 1

    def describe(self, chunk: int) -> str:
        file, start, end = self._pieces.locate(chunk)
        return f"{self._files[file]} bytes {start}-{end}"

    def amount(self) -> list[int]:
        return [len(self._files), sum(self._pieces.sizes)]


class CompressedJsonlCorpus:
    """Compressed files (zstd, gzip), each a chunk that is read as a stream, its lines the places. Needs pyarrow.

    To go on inside a file its lines before are unpacked and counted, not parsed.

    Raises:
        UserError: pyarrow is missing; an empty file.
    """

    streamed = True

    def __init__(self, files: Sequence[Path], key: str) -> None:
        try:
            import pyarrow  # noqa: F401 (asked for before the run begins)
        except ImportError:
            command = install_command("pyarrow")
            raise UserError(f"compressed files need pyarrow; install it with: {command}") from None
        self._files, self._key, self._sizes = list(files), key, file_sizes(files)

    def __len__(self) -> int:
        return len(self._files)

    def size(self, chunk: int) -> int:
        raise RuntimeError("how many documents a stream has shows at its end")

    def read(self, chunk: int, start: int | None = None, part: int = 0, parts: int = 1) -> Iterator[tuple[int, str]]:
        """Give the documents of one file; empty lines and empty texts are left out."""
        path, found = self._files[chunk], bool(start)
        for number, place, line in _unpacked_lines(path, start or 0):
            found = found or bool(line.strip())
            if number % parts == part and (document := _document(line, self._key, path, place, number + 1)):
                yield number, document
        if not found:
            raise is_empty(path)

    def describe(self, chunk: int) -> str:
        return str(self._files[chunk])

    def amount(self) -> list[int]:
        return [len(self._files), sum(self._sizes)]


def _unpacked_lines(path: Path, first: int) -> Iterator[tuple[int, int, bytes]]:
    """Give number (from 0), place in the unpacked text, and bytes of the lines from number `first` on."""
    import pyarrow

    number, place, begun = 0, 0, b""
    try:
        with pyarrow.OSFile(str(path)) as file, pyarrow.CompressedInputStream(file, CODECS[path.suffix]) as stream:
            while block := stream.read(_BLOCK):
                if number < first and number + block.count(b"\n") < first:
                    number += block.count(b"\n")
                    place += len(begun) + len(block)
                    begun = b""
                    continue
                *lines, rest = (begun + block).split(b"\n")
                for line in lines:
                    if number >= first:
                        yield number, place, line
                    number, place = number + 1, place + len(line) + 1
                begun = rest
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be unpacked after line {number}: {reason}; it is damaged or cut short, get it again"
        ) from None
    if begun and number >= first:
        yield number, place, begun


def _document(raw: bytes, key: str, path: Path, offset: int, number: int | None) -> str | None:
    """Return the document of a line that stands at byte `offset`, None for an empty line.

    `number`: of the line, from 1; None: it is counted where an error needs it.
    """
    text = decode(raw, path, offset)
    if not text.strip():
        return None
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = number or _line_number(path, offset)
        raise UserError(f"{path} line {line} is not valid JSON: {error}; correct or remove it") from None
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        line = number or _line_number(path, offset)
        raise UserError(f'{path} line {line} is not a JSON object with text under "{key}"; set its field')
    return str(row[key])


def _line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that starts at byte `offset`."""
    count, left = 1, offset
    with path.open("rb") as file:
        while left and (block := file.read(min(left, _BLOCK))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count
