"""Text of tokens as they come: a piece at a time, without cutting characters or stop strings in two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character, or none yet."""

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so tokens that it may be spread over."""

WINDOW, LONGEST_WINDOW = 16, 64
"""Tokens that are decoded again with each new one, for their effect on its text; at most, if no character ends."""


class TextStream:
    """Decodes tokens piece by piece; all pieces are the text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.window: list[int] = []
        self.given = 0
        """Characters of the window's text that were given already."""

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self.window, skip_special_tokens=True))

    def add(self, ids: Iterable[int], last: bool = False) -> str:
        """The text of these tokens, as far as it cannot change any more; with `last`, all of it."""
        pieces = []
        for token in ids:
            self.window.append(token)
            pieces.append(self._piece(last=False))
        return "".join(pieces) + (self._piece(last=True) if last else "")

    def _piece(self, last: bool) -> str:
        text = self._decoded()
        whole = last or not text.endswith(BROKEN) or len(self.window) >= LONGEST_WINDOW
        end = len(text) if whole else max(self.given, len(text) - LONGEST_CHARACTER + 1)
        piece, self.given = text[self.given : end], max(self.given, end)
        if whole and len(self.window) > WINDOW:
            self.window = self.window[-LONGEST_CHARACTER:]
            self.given = len(self._decoded())
        return piece


class StopStrings:
    """Looks for the first of some strings in a text that comes in pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.held = max(map(len, strings), default=1) - 1
        """Characters at the end of a text that may be the beginning of a stop string."""
        self.text, self.looked = "", 0

    def add(self, piece: str) -> bool:
        """Add a piece; whether the text has ended, which is cut then."""
        self.text += piece
        start = max(0, self.looked - self.held)
        found = [place for string in self.strings if (place := self.text.find(string, start)) >= 0]
        self.looked = len(self.text)
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
