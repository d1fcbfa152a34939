"""States of beginnings that several prompts share, in memory: a prompt goes on from the longest that is known.

A state takes megabytes, so none is kept for a beginning that comes once. The first prompt leaves marks, a few bytes
each, at the borders of its blocks; a second one with the same beginning is read up to there first, and its state kept.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from longrecall.models.state import RecurrentState

BLOCK = 256
"""Tokens from one border to the next."""

MOST_MARKS = 1 << 16
"""Borders that are remembered, those seen last."""


class Prefixes:
    """A store of states, those used last, of so many bytes in all; for one thread."""

    def __init__(self, most_bytes: int, block: int = BLOCK) -> None:
        self.most_bytes, self.block = most_bytes, block
        self.bytes = 0
        self._states: OrderedDict[bytes, tuple[RecurrentState, int]] = OrderedDict()
        self._marks: OrderedDict[bytes, None] = OrderedDict()

    def borders(self, start: str, tokens: Sequence[int]) -> dict[int, bytes]:
        """Number of tokens -> name of that beginning, for every border before the last token.

        `start`: what was read before them, such as the name of a text.
        """
        if not self.most_bytes:
            return {}
        digest = hashlib.blake2b(f"{start}\n".encode(), digest_size=16)
        found = {}
        for end in range(self.block, len(tokens), self.block):
            digest.update(array("q", tokens[end - self.block : end]).tobytes())
            found[end] = digest.digest()
        return found

    def find(self, borders: dict[int, bytes]) -> tuple[int, RecurrentState | None]:
        """The longest beginning whose state is kept: its tokens and its state ``[1]``; 0 and None without any."""
        for end in sorted(borders, reverse=True):
            if borders[end] in self._states:
                self._states.move_to_end(borders[end])
                return end, self._states[borders[end]][0]
        return 0, None

    def mark(self, borders: dict[int, bytes]) -> int:
        """Remember these borders; the last of them that an earlier prompt had too, 0 where there is none."""
        shared = max((end for end, name in borders.items() if name in self._marks), default=0)
        for name in borders.values():
            self._marks[name] = None
            self._marks.move_to_end(name)
        while len(self._marks) > MOST_MARKS:
            self._marks.popitem(last=False)
        return shared

    def keep(self, name: bytes, state: RecurrentState) -> None:
        """Keep a state ``[1]``, in the place of those that were not used for longest; none that alone is too large."""
        size = sum(tensor.nbytes for layer in state.layers for tensor in layer.values())
        if name in self._states or size > self.most_bytes:
            return
        self._states[name] = state, size
        self.bytes += size
        while self.bytes > self.most_bytes:
            _, (_, less) = self._states.popitem(last=False)
            self.bytes -= less
