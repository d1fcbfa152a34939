"""Reading text files that users name."""

from __future__ import annotations

from pathlib import Path

from longrecall.errors import UserError


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, line ends untouched.

    Raises `UserError` when the file is missing, empty or not UTF-8 (naming the offset of the first bad byte).
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the text file {path}: {error.strerror or error}") from error
    if not data:
        raise UserError(f"the text file {path} is empty; give a file with text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text file {path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it to UTF-8 first"
        ) from error
