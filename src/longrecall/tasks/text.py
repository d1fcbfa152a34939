"""Texts: files that users name, the books that ship, and sentences."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path

from longrecall.errors import UserError

_END = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+|(?<=[.!?][\"'])\s+")


@cache
def shipped_text(name: str) -> str:
    """Return a public-domain text that ships with the package: ``held_out`` or ``train`` (assets/text/README.md)."""
    return resources.files("longrecall").joinpath("assets", "text", f"{name}.txt").read_text(encoding="utf-8")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, each on one line; a blank line or a form feed ends one too."""
    found = []
    for paragraph in re.split(r"\s*\n\s*\n\s*|\f", text):
        found += [sentence for sentence in _END.split(" ".join(paragraph.split())) if sentence]
    return found


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
