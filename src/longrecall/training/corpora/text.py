"""Plain text, UTF-8: documents end at a form feed and at the end of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from longrecall.training.corpora.base import Pieces, decode, file_sizes, is_empty, read_bytes

DOCUMENT_END = b"\x0c"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TextCorpus:
    """Chunks of about `chunk_bytes`. Small documents share one; a longer one is cut where a paragraph or line ends.

    A file is cut at every multiple of `chunk_bytes`, moved back to the last end of a document before it: no index is
    made, so a corpus of any size is there at once.

    Raises:
        UserError: a file that is empty or not UTF-8 (with the byte offset).
    """

    streamed = False

    def __init__(self, files: Sequence[Path], chunk_bytes: int) -> None:
        self._files = list(files)
        self._pieces = Pieces(file_sizes(files), chunk_bytes)
        empty: dict[int, bool] = {}
        for chunk in self._pieces.checked():
            file, _, end = self._pieces.locate(chunk)
            empty[file] = not list(self.read(chunk)) and empty.get(file, True)
            if empty[file] and end == self._pieces.sizes[file]:
                raise is_empty(self._files[file])

    def __len__(self) -> int:
        return len(self._pieces)

    def _chunk(self, chunk: int) -> tuple[Path, int, bytes]:
        """Return the file of a chunk, where it begins, and its bytes."""
        file, start, end = self._pieces.locate(chunk)
        path, size, step = self._files[file], self._pieces.sizes[file], self._pieces.piece
        base = max(0, start - step)
        # Three bytes more: a character that the cut would fall into ends there.
        raw = read_bytes(path, base, min(size, end + 3))
        begin = _cut(raw, 0, start - base) if start else 0
        stop = len(raw) if end == size else _cut(raw, start - base, end - base)
        if not start and raw.startswith(_BYTE_ORDER_MARK):
            begin = len(_BYTE_ORDER_MARK)
        return path, base + begin, raw[begin:stop]

    def size(self, chunk: int) -> int:
        """Return the number of documents, or pieces of one, empty ones included."""
        return self._chunk(chunk)[2].count(DOCUMENT_END) + 1

    def read(self, chunk: int, start: int | None = None, part: int = 0, parts: int = 1) -> Iterator[tuple[int, str]]:
        """Give the documents (or the piece of one) in this chunk, without their form feeds."""
        path, place, raw = self._chunk(chunk)
        for number, document in enumerate(raw.split(DOCUMENT_END)):
            if number >= (start or 0) and number % parts == part and document.strip():
                yield number, decode(document, path, place)
            place += len(document) + 1

    def describe(self, chunk: int) -> str:
        file, start, end = self._pieces.locate(chunk)
        return f"{self._files[file]} bytes {start}-{end}"

    def amount(self) -> list[int]:
        return [len(self._files), sum(self._pieces.sizes)]


def _cut(data: bytes, start: int, end: int) -> int:
    """Return where in (start, end] to cut: after a document, else a paragraph, a line, a word, a character."""
    document = data.rfind(DOCUMENT_END, start, end)
    if document >= start:
        return document + 1
    for mark in (b"\n\n", b"\n", b" "):
        place = data.rfind(mark, start + (end - start) // 2, end)
        if place >= 0:
            return place + len(mark)
    # Bytes 10xxxxxx continue a character; a character has at most three of them.
    for back in range(min(4, end - start)):
        if data[end - back] & 0xC0 != 0x80:
            return end - back
    return end
