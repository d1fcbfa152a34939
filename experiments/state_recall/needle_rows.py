r"""Rows of bytes with needles: short lines `@key:value` in a haystack, asked for at its end as `?key:value`.

Two needles and two questions, values of five digits (``|`` is a line feed, ``.`` a label of -100):

    input   @ q x : 4 8 2 1 9 | @ b e : 0 7 3 3 1 | ? b e : 0 7 3 3 1 | ? q x : 4 8 2 1 9 |
    label   . . . . . . . . . . . . . . . . . . . . . . . . 0 7 3 3 1 . . . . . 4 8 2 1 9 .

A value is a number or a UUID (36 characters with its hyphens). The haystack is made of needles alone, as in RULER's
niah_multikey_2 and _3, so that all of it asks for memory, or of prose with few needles, as in niah_single_2 and _3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.common.from_scratch import crops
from experiments.common.mixture import IGNORE, opened

KEY = 2
"""Letters of a key: 676 keys."""
LINE = KEY + 3
"""Bytes of a line without its value: mark, key, colon, line feed."""
HYPHENS = (8, 13, 18, 23)
ALPHABETS = {"number": b"0123456789", "uuid": b"0123456789abcdef"}
WIDTHS = {"number": 5, "uuid": 36}
"""Characters of a whole value."""
KINDS = tuple(WIDTHS)
SHORT, FEW = 2, 8
"""Characters and needles, at most, at the beginning of training."""
WIDEST_SHARE = 0.7
NEEDLE, QUESTION = ord("@"), ord("?")
Rows = tuple[np.ndarray, np.ndarray]
Cuts = tuple[tuple[float, int], ...]


def draw_lines(g: np.random.Generator, rows: int, count: int, kind: str, width: int) -> np.ndarray:
    """Needle lines of different keys: int64 ``[rows, count, LINE + width]``; values are cut to `width` characters."""
    keys = np.argsort(g.random((rows, 26**KEY)), axis=1)[:, :count]
    alphabet = np.frombuffer(ALPHABETS[kind], np.uint8).astype(np.int64)
    lines = np.full((rows, count, LINE + width), NEEDLE, dtype=np.int64)
    for letter in range(KEY):
        lines[..., 1 + letter] = keys // 26**letter % 26 + ord("a")
    lines[..., KEY + 1] = ord(":")
    lines[..., KEY + 2 : -1] = alphabet[g.integers(len(alphabet), size=(rows, count, width))]
    if kind == "uuid":
        for at in HYPHENS:
            if at < width:
                lines[..., KEY + 2 + at] = ord("-")
    lines[..., -1] = ord("\n")
    return lines


def questions(lines: np.ndarray) -> Rows:
    """Needle lines ``[..., w]`` asked for: (ids, labels); what is labelled are the values."""
    asked = lines.copy()
    asked[..., 0] = QUESTION
    labels = np.full_like(asked, IGNORE)
    labels[..., KEY + 2 : -1] = asked[..., KEY + 2 : -1]
    return asked, labels


def needle_rows(g: np.random.Generator, counts: np.ndarray, kind: str, width: int, length: int) -> Rows:
    """Training rows: ``counts[r]`` needles, then questions drawn with replacement: int64 ``[rows, length]`` twice."""
    rows, size = len(counts), LINE + width
    slots = -(-length // size)
    lines = draw_lines(g, rows, int(counts.max()), kind, width)
    place = np.arange(slots)
    is_needle = place < counts[:, None]
    which = np.where(is_needle, place, np.floor(g.random((rows, slots)) * counts[:, None]).astype(np.int64))
    chosen = np.take_along_axis(lines, which[..., None], axis=1)
    asked, labels = questions(chosen)
    ids = np.where(is_needle[..., None], chosen, asked).reshape(rows, -1)[:, :length]
    labels = np.where(is_needle[..., None], IGNORE, labels).reshape(rows, -1)[:, :length]
    return ids, labels


def needle_exam(g: np.random.Generator, rows: int, count: int, asked: int, kind: str) -> Rows:
    """Test rows: `count` whole needles, then `asked` of them, each once."""
    lines = draw_lines(g, rows, count, kind, WIDTHS[kind])
    which = np.argsort(g.random((rows, count)), axis=1)[:, :asked]
    ids, labels = questions(np.take_along_axis(lines, which[..., None], axis=1))
    haystack = lines.reshape(rows, -1)
    return opened(
        np.concatenate([haystack, ids.reshape(rows, -1)], axis=1),
        np.concatenate([np.full_like(haystack, IGNORE), labels.reshape(rows, -1)], axis=1),
    )


def prose_row(
    g: np.random.Generator, tokens: np.ndarray, length: int, kind: str, width: int, count: int, asked: int, reach: float
) -> Rows:
    """One row of prose with `count` needles in the last share `reach` of it, `asked` of them asked for at its end.

    The prose is labelled as well; the needles are not.
    """
    size = LINE + width
    lines = draw_lines(g, 1, count, kind, width)[0]
    prose = crops(tokens, g, 1, length - (count + asked) * size)[0]
    first = int(len(prose) * (1.0 - reach))
    places = np.sort(g.integers(first, len(prose) + 1, size=count))
    ids, labels, done = [], [], 0
    for place, line in zip(places, lines, strict=True):
        ids += [prose[done:place], line]
        labels += [prose[done:place], np.full_like(line, IGNORE)]
        done = place
    wanted, scored = questions(lines[g.permutation(count)[:asked]])
    return (
        np.concatenate([*ids, prose[done:], wanted.ravel()]),
        np.concatenate([*labels, prose[done:], scored.ravel()]),
    )


def prose_exam(g: np.random.Generator, tokens: np.ndarray, rows: int, length: int, kind: str) -> Rows:
    """Test rows of `length` bytes, the question with its answer included: one whole needle anywhere in prose."""
    made = [prose_row(g, tokens, length, kind, WIDTHS[kind], 1, 1, 1.0) for _ in range(rows)]
    ids, labels = np.stack([row[0] for row in made]), np.stack([row[1] for row in made])
    # Only the answer is asked for, not the prose.
    labels[:, : length - LINE - WIDTHS[kind]] = IGNORE
    return opened(ids, labels)


@dataclass
class Mixture:
    """The batches of an experiment, a pure function of (seed, step, steps).

    Rows: `text` of books, `needles` of needles alone (numbers and UUIDs in turn), `prose` of books with needles.
    Values are of one or two characters at first: a small recurrent model that begins with whole ones stays on the
    plateau of guessing. Then the widest value, the most needles and the distance in prose grow, each doubling as fast
    as before, until `ramp` of the steps.
    """

    seed: int
    steps: int
    length: int
    text: int
    needles: int
    prose: int
    tokens: np.ndarray
    early: float = 0.1
    """Share of the steps with values of at most `SHORT` characters and at most `FEW` needles."""
    ramp: float = 0.5
    haystack: float = 0.7
    """Share of a row that needles take at most; the rest is questions."""
    least: int = 1
    """Needles of a row at least, where so many fit: with one or two, answers can be guessed without their keys."""
    cuts: Cuts = ()
    """(share of the steps, pieces): until that share every row is so many rows, of the length divided by it."""

    def pieces(self, step: int) -> int:
        """Rows that take the place of one at `step`; 1 after the last of `cuts`."""
        return next((pieces for until, pieces in self.cuts if step < until * self.steps), 1)

    def most(self, width: int, length: int) -> int:
        """Most needles of a row of `length` bytes with values of `width` characters."""
        return max(2, int(self.haystack * length / (LINE + width)))

    def batch(self, step: int) -> Rows:
        """ids and labels ``[rows, length]`` of one step; every row opens with the end token.

        With `cuts` these are ``[rows * pieces, length / pieces]``: as many tokens in shorter rows.
        """
        g = np.random.Generator(np.random.PCG64([23, self.seed, step]))
        share, pieces = step / self.steps, self.pieces(step)
        grown = min(1.0, max(0.0, share - self.early) / (self.ramp - self.early))
        length = self.length // pieces - 1
        parts = []
        if self.text:
            text = crops(self.tokens, g, self.text * pieces, length)
            parts.append((text, text))
        needles = np.arange(self.needles * pieces)
        for index, rows in enumerate(len(part) for part in np.array_split(needles, len(KINDS))):
            if not rows:
                continue
            width = self._width(g, KINDS[index], grown)
            most = self.most(width, length)
            ceiling = min(FEW, most) ** (1 - grown) * most**grown
            # Uniform in the logarithm: few needles stay frequent.
            least = min(self.least, most)
            counts = (least * np.exp(g.random(rows) * np.log((max(ceiling, least) + 1) / least))).astype(np.int64)
            parts.append(needle_rows(g, counts, KINDS[index], width, length))
        for index in range(self.prose * pieces):
            kind = KINDS[index % len(KINDS)]
            # Needles and questions take at most half of the row.
            width, reach = min(self._width(g, kind, grown), length // 4 - LINE), max(0.05, grown)
            count = min(int(g.integers(1, 5)), max(1, length // (4 * (LINE + width))))
            row = prose_row(g, self.tokens, length, kind, width, count, count, reach)
            parts.append((row[0][None], row[1][None]))
        return opened(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))

    def _width(self, g: np.random.Generator, kind: str, grown: float) -> int:
        """Characters of the values of one step: the widest of this time in most steps, anything below in the others."""
        widest = round(SHORT ** (1 - grown) * WIDTHS[kind] ** grown)
        return widest if g.random() < WIDEST_SHARE else int(g.integers(1, widest + 1))
