"""A book as background: its sentences, in order, tokenised once."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.babilong.world import DIRECTIONS, PEOPLE
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.text import shipped_text, split_sentences

Ints = NDArray[np.int64]

__all__ = ["FEWEST_TOKENS", "Haystack", "sentences", "shipped_text", "tokenise"]

FEWEST_TOKENS = 10
"""Shorter sentences are left out, as published: headings, exclamations."""

_OF_THE_WORLD = re.compile(rf"\b(?:{'|'.join(PEOPLE)}|(?:{'|'.join(DIRECTIONS)}) of)\b")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, each on one line.

    Those that name a person of the stories, or say what lies in a direction of what, are left out: they could be taken
    for facts.
    """
    return [sentence for sentence in split_sentences(text) if not _OF_THE_WORLD.search(sentence)]


@dataclass(frozen=True)
class Haystack:
    """Sentences as tokens, each with its line feed: `tokens` int64 [n], `starts` int64 [sentences]."""

    tokens: Ints
    starts: Ints

    def passage(self, sentence: int, room: int) -> tuple[Ints, Ints]:
        """Return `room` tokens that end where `sentence` begins, and the places in them where a line begins or ends.

        Read backwards they are whole lines; only the first may be cut. A text that is too short is gone through again,
        its last sentence before its first.
        """
        end = int(self.starts[sentence])
        begin, size = end - room, len(self.tokens)
        whole = np.take(self.tokens, np.arange(begin, end), mode="wrap")
        rounds = np.arange(begin // size, end // size + 1)[:, None] * size
        lines = (self.starts + rounds).reshape(-1)
        inside = lines[(lines > begin) & (lines < end)] - begin
        return whole, np.concatenate(([0], inside, [room])) if room else np.zeros(1, dtype=np.int64)


def tokenise(encode: PieceEncoder, text: str) -> Haystack:
    """Return the haystack of a text, made once per encoder; raise `UserError` when no sentence is long enough."""
    return encode.derived(("babilong haystack", text), lambda: _tokenise(encode, text))


def _tokenise(encode: PieceEncoder, text: str) -> Haystack:
    lines = [encode(sentence + "\n") for sentence in sentences(text)]
    kept = [line for line in lines if len(line) > FEWEST_TOKENS]
    if not kept:
        raise UserError(
            f"babilong: the haystack text has no sentence of {FEWEST_TOKENS} tokens or more; give running text"
        )
    sizes = np.array([len(line) for line in kept], dtype=np.int64)
    return Haystack(np.concatenate([np.array(line, dtype=np.int64) for line in kept]), np.cumsum(sizes) - sizes)
