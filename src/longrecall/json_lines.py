"""Files of JSON lines that grow while work goes on, and survive a kill in the middle of a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.files import refuse_links, remove_temporary, write_text


class JsonLines:
    """A file that is written line by line; each line is on the disk when `write` returns. Nothing before `open`."""

    def __init__(self, path: Path, advice: str) -> None:
        self.path, self._advice = path, advice
        self._file: FileIO | None = None  # without a buffer: nothing is left to be written when a full disk ends it

    def open(self, whole: int) -> None:
        """Go on after the first `whole` bytes, 0 = anew; UserError where the file cannot be written."""
        try:
            refuse_links(self.path)
            self._file = self.path.open("r+b" if whole else "wb", buffering=0)
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}; {self._advice}") from error

    def begin(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Open the file anew with these lines: a kill, or a full disk, leaves it with all of them or as it was."""
        text = _text(lines)
        remove_temporary(self.path)
        write_text(self.path, text, self._advice)
        self.open(len(text))

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append the lines; does nothing while the file is not open."""
        if self._file is not None:
            rest = memoryview(_text(lines).encode("ascii"))
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError as error:  # the system names no file
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Stop writing; the file stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _text(lines: Iterable[Mapping[str, Any]]) -> str:
    """The lines of a file, in ASCII."""
    return "".join(json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n" for line in lines)


def read_json_lines(path: Path, take: Callable[[int, Any], None]) -> int:
    """Give every line (its number from 1, its data) to `take` and return the bytes of whole lines.

    A last line that a kill cut off is left out.

    Raises:
        UserError: an unreadable file, or another line that is no JSON or that `take` refuses (KeyError, TypeError,
            ValueError): the line is named.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; start over with --force") from error
    whole = 0
    for number, line in enumerate(lines[:-1], start=1):
        try:
            take(number, json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            if number > 1 and not any(lines[number:]):
                break
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"cannot resume {path}: line {number} is damaged ({reason}); start over with --force"
            ) from error
        whole += len(line) + 1
    return whole
