"""Haystacks that fill a number of tokens with whole lines or sentences, and the needles among them.

Each function returns the body of a prompt, int64 [at most `room`]. It stops at the last line or sentence that fits, so
it ends at every size; what is left over is less than the next line or sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.needles.pieces import Essay, Frame, Ints, Tokens, array
from longrecall.tasks.needles.wording import NOISE, Kind, draw_distinct, draw_keys, draw_values

Places = Callable[[int], list[int]]
"""Lines or sentences -> how many of them stand before each needle."""

Needled = Sequence[tuple[int, Tokens]]
"""Needles by place, in order."""

_DEPTHS = 40


def published_depths(generator: np.random.Generator, needles: int) -> list[int]:
    """Return different depths in percent, from 40 equally spaced ones (0 and 100 among them)."""
    return [(200 * step + _DEPTHS - 1) // (2 * (_DEPTHS - 1)) for step in draw_distinct(generator, _DEPTHS, needles)]


def _woven(boundaries: Callable[[int], int], take: Callable[[int, int], Ints], count: int, put: Needled) -> Ints:
    """Return `count` lines with each needle put before the line it belongs to.

    `boundaries`: lines -> the tokens that stand before the next; `take`: the tokens from one place to another.
    """
    parts, done = [], 0
    for place, tokens in put:
        here = boundaries(place)
        parts += [take(done, here), array(tokens)]
        done = here
    return np.concatenate([*parts, take(done, boundaries(count))])


def _in_order(places: Sequence[int], needles: Sequence[Tokens]) -> list[tuple[int, Tokens]]:
    return sorted(zip(places, needles, strict=True), key=lambda pair: pair[0])


def noise_body(encode: PieceEncoder, needles: Sequence[Tokens], room: int, places: Places) -> Ints:
    """Return the noise line over and over, and the needles."""
    line = array(encode(f"{NOISE}\n"))
    count = (room - sum(map(len, needles))) // len(line)
    lines = np.tile(line, count)
    return _woven(lambda n: n * len(line), lambda a, b: lines[a:b], count, _in_order(places(count), needles))


def needles_body(
    generator: np.random.Generator,
    frame: Frame,
    kind: Kind,
    needles: Sequence[Tokens],
    taken: set[str],
    room: int,
    places: Places,
) -> Ints:
    """Return needles with other keys (none of `taken`, to which they are added) and other values, and the needles."""
    left = room - sum(map(len, needles))
    lines: list[Tokens] = []
    used, full = 0, False
    while not full:
        block = 1 + (left - used) // max(1, used // len(lines) if lines else len(needles[0]))
        keys = draw_keys(generator, kind, block, taken)
        for line in frame.needles(keys, draw_values(generator, kind, block), spaced=False):
            full = used + len(line) > left
            if full:
                break
            lines.append(line)
            used += len(line)
    tokens = array([token for line in lines for token in line])
    ends = np.cumsum([0, *map(len, lines)])
    put = _in_order(places(len(lines)), needles)
    return _woven(lambda n: int(ends[n]), lambda a, b: tokens[a:b], len(lines), put)


def essay_body(
    text: Essay, plain: Sequence[Tokens], spaced: Sequence[Tokens], room: int, places: Places
) -> tuple[Ints, int]:
    """Return the sentences of a text from its beginning, gone through again where it ends, and how many they are.

    `plain`, `spaced`: the needles without and with a space before them; whatever comes first has none.
    """
    # The space that the first sentence or needle lacks may save a token or two.
    count = text.most(room - sum(map(len, spaced)) + 2)
    while True:
        body = _essay_of(text, plain, spaced, count, places(count))
        if len(body) <= room or count == 0:
            return body, count
        count -= 1


def _essay_of(text: Essay, plain: Sequence[Tokens], spaced: Sequence[Tokens], count: int, places: list[int]) -> Ints:
    order = sorted(range(len(places)), key=lambda index: places[index])
    put = [(places[index], spaced[index]) for index in order]
    opens = count == 0 or places[order[0]] == 0
    if opens:
        put[0] = (0, plain[order[0]])
    body = _woven(text.offset, text.take, count, put)
    return body if opens else np.concatenate((text.first, body[text.offset(1) :]))
