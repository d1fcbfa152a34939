"""What a page is made of: sections with tables and figures, as plain values that the template writes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longrecall.report.summaries import Number

BEST = "best"
"""The last line of a cell that holds the best number of its column."""


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row. `hidden` tables unfold on a click (they back a plot).

    A cell is one line, or a main line and smaller lines under it, separated by line feeds; the last line of one that
    stands out is `BEST`.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    hidden: bool = False
    last_counts: bool = False
    """Whether its last column is what it is about."""
    kind: str = "table"


@dataclass(frozen=True)
class Plot:
    """An <svg> element, what it shows, one sentence on how to read it, and its numbers as a table."""

    svg: str
    caption: str
    reading: str
    data: Table
    kind: str = "plot"


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str
    kind: str = "note"


@dataclass(frozen=True)
class Findings:
    """What a diagnosis says of one checkpoint: (name, what was found, what to do) of each finding."""

    label: str
    found: tuple[tuple[str, str, str], ...]
    kind: str = "findings"


@dataclass(frozen=True)
class Words:
    """A verdict in words: what sums it up, (name, sentence, what it asks) of each task, and how it was judged."""

    opening: str
    told: tuple[tuple[str, str, str], ...]
    method: str
    kind: str = "words"


Block = Table | Plot | Note | Findings | Words


_SPOKEN_ROWS = 24
_MOST_DIGITS = 9


def spoken(plot: Plot) -> str:
    """Return a plot's numbers as sentences for a screen reader: the first lines of its table's cells, row by row."""
    header, rows = plot.data.header, plot.data.rows
    sentences = [
        ", ".join(f"{name} {cell.splitlines()[0]}" for name, cell in zip(header, row, strict=True) if cell)
        for row in rows[:_SPOKEN_ROWS]
    ]
    rest = len(rows) - len(sentences)
    more = [f"{rest} more rows are in the table that follows"] if rest else []
    return ". ".join([plot.data.caption, *sentences, *more]) + "."


@dataclass(frozen=True)
class Section:
    """A heading with its blocks; `id` is its place in the page."""

    id: str
    title: str
    blocks: Sequence[Block] = field(default=())


def with_interval(number: Number, digits: int = 3, signed: bool = False) -> str:
    """Return the value and, in a second line, its interval: ``0.912`` over ``0.903 to 0.920``; a dash for no value.

    An interval of one number says nothing and is left out; one that is narrower than the digits gets more of them.
    """
    if number.value is None:
        return "–"
    sign = "+" if signed else ""
    if number.low is None or number.high is None or number.low >= number.high:
        return _minus(f"{number.value:{sign}.{digits}f}")
    while digits < _MOST_DIGITS and f"{number.low:.{digits}f}" == f"{number.high:.{digits}f}":
        digits += 1
    form = f"{sign}.{digits}f"
    return _minus(f"{number.value:{form}}\n{number.low:{form}} to {number.high:{form}}")


def _minus(text: str) -> str:
    return text.replace("-", "−")
