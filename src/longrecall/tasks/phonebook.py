r"""Phone book: name -> number lines, then queries. How many associations can a model hold?

Two pairs of two letters and two digits, one query each; bytes as tokens (``_`` is a space, ``|`` a line feed, ``.``
a label of -100). A label stands at the index of its own token:

    input   q x _ 4 1 | b e _ 0 7 | ? b e _ 0 7 | ? q x _ 4 1 |
    label   . . . . . . . . . . . . . . . . 0 7 . . . . . 4 1 .

Entry lines are ``{name} {number}\n``, query lines ``?{name} {number}\n``. The names of one book are distinct. In
training text every query is drawn afresh from all pairs: were each pair asked once a round, a model could answer the
later queries by elimination, and small models learn just that instead of recall. In evaluation at most half of the
pairs are asked, each once. Distractor text, when there is any, stands between the last entry and the first query.
Unless `opening` is false, the tokenizer's beginning-of-text token, where it has one, stands before everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks import declaration as declare
from longrecall.tasks.charts import PanelChart, TaskSection
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, Sample, TextEncoder, draw_integers, sample_generator
from longrecall.tasks.wording import Wording, listed
from longrecall.units import parse_length
from longrecall.value_rules import check_weight, positive

Ints = NDArray[np.int64]


def _check_book(pairs: int, letters: int, digits: int) -> None:
    if letters < 1 or digits < 1:
        raise UserError(f"phonebook: letters ({letters}) and digits ({digits}) must be at least 1")
    if pairs < 1:
        raise UserError(f"phonebook: pairs must be at least 1, got {pairs}")
    if pairs > 26**letters:
        raise UserError(
            f"phonebook: {pairs} pairs need {pairs} distinct names, but {letters} letters give only {26**letters}; "
            "ask for more letters or fewer pairs"
        )


def _distinct_codes(generator: np.random.Generator, rows: int, count: int, space: int) -> Ints:
    """Return [rows, count] codes in [0, space), distinct within a row, uniform over such rows."""
    if 4 * count > space:
        return np.argsort(generator.random((rows, space)), axis=1, kind="stable")[:, :count]
    codes = draw_integers(generator, space, (rows, count))
    open_rows = np.arange(rows)
    # Redrawing the later of two equal codes treats all codes alike, so the result is uniform over distinct rows.
    while len(open_rows):
        part = codes[open_rows]
        order = np.argsort(part, axis=1, kind="stable")
        ordered = np.take_along_axis(part, order, axis=1)
        repeated = np.zeros(part.shape, dtype=bool)
        np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        part[repeated] = draw_integers(generator, space, (int(repeated.sum()),))
        codes[open_rows] = part
        open_rows = open_rows[repeated.any(axis=1)]
    return codes


def _names(codes: Ints, letters: int) -> NDArray[np.uint8]:
    """Return the letters of each code as ASCII bytes, [..., letters]."""
    powers = 26 ** np.arange(letters - 1, -1, -1, dtype=np.int64)
    return (codes[..., None] // powers % 26 + ord("a")).astype(np.uint8)


def _independent(generator: np.random.Generator, pairs: Ints, queries: int) -> Ints:
    """Return [rows, queries] pair indices, each uniform over the row's pairs and independent of the others."""
    return np.asarray(np.floor(generator.random((len(pairs), queries)) * pairs[:, None]), dtype=np.int64)


def phonebook_byte_batch(
    generator: np.random.Generator, rows: int, length: int, pairs: Ints, letters: int = 2, digits: int = 2
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), both int64 [rows, length]: phone books as bytes, queries until full.

    There is no beginning-of-text token: that is for the caller to put in front.
    `pairs` int [rows] is the number of entries of each row. The last query may be cut; the digits of a cut number are
    not labelled. No Python loop runs over rows. Raises `UserError` when a book with one query does not fit.
    """
    pairs = np.asarray(pairs, dtype=np.int64)
    if pairs.shape != (rows,) or rows < 1:
        raise UserError(f"phonebook: pairs must be one number for each of the {rows} rows, got shape {pairs.shape}")
    most = int(pairs.max())
    _check_book(int(pairs.min()), letters, digits)
    _check_book(most, letters, digits)
    entry, query = letters + digits + 2, letters + digits + 3
    if most * entry + query > length:
        raise UserError(
            f"phonebook: {most} pairs and one query take {most * entry + query} bytes, more than the length {length}"
        )
    records = np.empty((rows, most, query), dtype=np.uint8)
    records[:, :, 0] = ord("?")
    records[:, :, 1 : letters + 1] = _names(_distinct_codes(generator, rows, most, 26**letters), letters)
    records[:, :, letters + 1] = ord(" ")
    records[:, :, letters + 2 : -1] = draw_integers(generator, 10, (rows, most, digits)) + ord("0")
    records[:, :, -1] = ord("\n")

    queries = -(-(length - int(pairs.min()) * entry) // query)
    order = _independent(generator, pairs, queries).astype(np.int32)
    column = np.arange(length, dtype=np.int32)
    start = (pairs * entry).astype(np.int32)[:, None]
    # An entry is a record without its question mark: one table serves both parts of a row.
    since = column - start
    asked = since >= 0
    slot, offset = np.divmod(np.where(asked, since, 0), np.int32(query))
    entry_pair, entry_offset = np.divmod(column, np.int32(entry))
    pair = np.where(asked, np.take_along_axis(order, slot, axis=1), entry_pair)
    offset = np.where(asked, offset, entry_offset + 1)
    base = (np.arange(rows, dtype=np.int64) * (most * query))[:, None]
    ids = records.reshape(-1)[base + pair * np.int32(query) + offset].astype(np.int64)
    whole = start + (slot + 1) * query - 1 <= length
    scored = asked & (offset >= letters + 2) & (offset < query - 1) & whole
    return ids, np.where(scored, ids, IGNORE)


@dataclass(frozen=True)
class _Book:
    """The tokens of a book, pair by pair; a query is the tokens of ``?`` and then those of the entry."""

    names: list[tuple[int, ...]]
    leads: list[tuple[int, ...]]
    numbers: list[tuple[int, ...]]
    question: tuple[int, ...]
    newline: tuple[int, ...]

    def entry_size(self, pair: int) -> int:
        return len(self.names[pair]) + len(self.leads[pair]) + len(self.numbers[pair]) + len(self.newline)

    def query_size(self, pair: int) -> int:
        return len(self.question) + self.entry_size(pair)


def _draw_book(generator: np.random.Generator, encode: PieceEncoder, pairs: int, letters: int, digits: int) -> _Book:
    _check_book(pairs, letters, digits)
    names = _names(_distinct_codes(generator, 1, pairs, 26**letters)[0], letters)
    numbers = (draw_integers(generator, 10, (pairs, digits)) + ord("0")).astype(np.uint8)
    answers = [encode.answer(row.tobytes().decode("ascii")) for row in numbers]
    return _Book(
        names=[encode(row.tobytes().decode("ascii")) for row in names],
        leads=[lead for lead, _ in answers],
        numbers=[number for _, number in answers],
        question=encode("?"),
        newline=encode("\n"),
    )


class _Writer:
    """Collects tokens and labels of one sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.labels: list[int] = []

    def add(self, tokens: Sequence[int], scored: bool = False) -> None:
        self.ids.extend(tokens)
        self.labels.extend(tokens if scored else [IGNORE] * len(tokens))

    def add_line(self, book: _Book, pair: int, query: bool, limit: int | None) -> None:
        """Append an entry or a query; of one that passes `limit` tokens, the number is labelled only if whole."""
        end = len(self.ids) + book.query_size(pair) - len(book.newline)
        self.add((book.question if query else ()) + book.names[pair] + book.leads[pair])
        self.add(book.numbers[pair], scored=query and (limit is None or end <= limit))
        self.add(book.newline)

    def arrays(self, length: int | None = None) -> tuple[Ints, Ints]:
        return np.array(self.ids[:length], dtype=np.int64), np.array(self.labels[:length], dtype=np.int64)


def _ask(generator: np.random.Generator, writer: _Writer, book: _Book, queries: int | None, limit: int | None) -> None:
    """Append `queries` queries of distinct pairs, or, when None, independent ones until `limit` tokens are reached."""
    count = len(book.names)
    if queries is not None:
        for pair in np.argsort(generator.random(count), kind="stable")[:queries]:
            writer.add_line(book, int(pair), query=True, limit=limit)
        return
    while limit is not None and len(writer.ids) < limit:
        writer.add_line(book, int(draw_integers(generator, count, ())), query=True, limit=limit)


def phonebook_sequence(
    generator: np.random.Generator,
    tokenizer: TextEncoder | PieceEncoder,
    length: int,
    pairs: tuple[int, int] = (2, 16),
    letters: int = 2,
    digits: int = 2,
    opening: bool = True,
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), int64 [length] each: one training sequence of exactly `length` tokens.

    The number of pairs is uniform in `pairs` (both ends included), bounded by what leaves room for a query; queries
    follow until the sequence is full. Pass a `PieceEncoder` to share its memory between calls. `opening`: begin with
    the tokenizer's beginning-of-text token, which counts in `length`.
    """
    low, high = pairs
    if low > high:
        raise UserError(f"phonebook: pairs ({low}, {high}) must be (lowest, highest)")
    _check_book(low, letters, digits)
    encode = tokenizer if isinstance(tokenizer, PieceEncoder) else PieceEncoder(tokenizer)
    # A line has at least one token, so no more than `length` pairs can fit.
    book = _draw_book(generator, encode, max(low, min(high, 26**letters, length)), letters, digits)
    sizes = [book.entry_size(pair) for pair in range(len(book.names))]
    begin = encode.opening if opening else ()
    room = length - len(begin) - max(book.query_size(pair) for pair in range(len(book.names)))
    fitting = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
    if fitting < low:
        raise UserError(
            f"phonebook: {low} pairs and one query do not fit into {length} tokens; use a longer length or fewer pairs"
        )
    count = low + int(draw_integers(generator, min(high, fitting) - low + 1, ())[()])
    book = _Book(book.names[:count], book.leads[:count], book.numbers[:count], book.question, book.newline)
    writer = _Writer()
    writer.add(begin)
    for pair in range(count):
        writer.add_line(book, pair, query=False, limit=None)
    _ask(generator, writer, book, None, length)
    return writer.arrays(length)


def _place(cell: Mapping[str, Any]) -> str:
    distance = cell.get("distance")
    pairs = cell["pairs"]
    return f"among {pairs} {'pair' if pairs == 1 else 'pairs'}" + (f", {distance} tokens away" if distance else "")


@dataclass(frozen=True)
class PhonebookSource(declare.TrainingSource):
    """Dense recall text made on the fly: name -> number lines, then queries; only the numbers that are asked for are
    labelled.
    """

    kind: ClassVar[str] = "phonebook"

    pairs: tuple[int, int] = (2, 16)
    """Fewest and most entries of a book; uniform between them."""
    letters: int = 2
    """Letters of a name."""
    digits: int = 2
    """Digits of a number."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        """Check the fields before anything runs."""
        check_weight(self.weight)
        positive(self, "letters", "digits")
        if not 1 <= self.pairs[0] <= self.pairs[1]:
            raise UserError(f"pairs must be [fewest, most] with 1 <= fewest <= most, got {list(self.pairs)}")

    def sequences(self, pieces: PieceEncoder) -> declare.Make:
        """Return the function that makes a training sequence."""
        return lambda generator, length: phonebook_sequence(
            generator, pieces, length, self.pairs, self.letters, self.digits
        )


def _headlines(cells: Sequence[Mapping[str, Any]]) -> list[declare.Headline]:
    asked = listed(sorted({cell["pairs"] for cell in cells}))
    hardest = max(cell["pairs"] for cell in cells)
    name = f"phone book: most pairs recalled at 90% or better, of {asked}"
    return [
        declare.Headline(name, summary="phonebook.capacity", digits=0),
        declare.Headline("phone book: accuracy, all cells"),
        declare.Headline(f"phone book: accuracy at {hardest:g} pairs", part={"pairs": hardest}),
    ]


_CHART = PanelChart(
    along="pairs",
    axis="pairs in the book",
    share="share recalled",
    panels="distance",
    panel_title=lambda distance: f"{distance:,.0f} tokens between" if distance else "no text between",
    title="Recall by number of pairs: share of queries answered, a line per result file",
    caption="Share of phone-book queries whose whole number is predicted, by how many pairs the book holds. "
    "Bars are 95% intervals.",
    reading="How to read it: the further right a line stays near the top, the more associations the state holds.",
)
_SECTION = TaskSection("Phone book by number of pairs", (_CHART,))


def _distance(text: str) -> int:
    return 0 if text == "0" else parse_length(text)


@dataclass(frozen=True)
class Phonebook:
    """The evaluation task: cells ``{"pairs", "distance"}``, one sequence per sample, scored by answer.

    `pairs`: numbers of associations. `distances`: tokens of distractor text between the last entry and the first query.
    `queries`: per sequence, of distinct pairs (None: half of the pairs, at least 1 and at most 8). `length`: fill to
    exactly this many tokens with independent queries instead. `distractor`: the text that distances are cut from.
    `opening`: begin every sequence with the tokenizer's beginning-of-text token, where it has one.
    """

    pairs: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    distances: tuple[int, ...] = (0,)
    letters: int = 2
    digits: int = 2
    queries: int | None = None
    length: int | None = None
    distractor: str = ""
    opening: bool = True

    name: ClassVar[str] = "phonebook"
    wording: ClassVar[Wording] = Wording(
        "phone book",
        "The model reads a list of names, each with a number, and is then asked for the numbers of some of the "
        "names. The more pairs it can hold, the larger its memory.",
        _place,
    )
    declared: ClassVar[declare.Declaration] = declare.Declaration(
        flags=(
            declare.Flag("--pairs", "pairs", "N,...", "associations"),
            declare.Flag("--distances", "distances", "N,...", "tokens of text before the queries", _distance),
            declare.Flag("--letters", "letters", "N", "letters of a name"),
            declare.Flag("--digits", "digits", "N", "digits of a number"),
        ),
        text_option="distractor",
        source=PhonebookSource,
        capacity=declare.Capacity("pairs", apart="distance", words="pairs recalled at 90%"),
        averaged=False,
        harness=declare.HarnessForm(16, ("\n",)),
        report=declare.ReportPart(("accuracy",), ("pairs",), headlines=_headlines, section=_SECTION),
    )

    def __post_init__(self) -> None:
        """Check every cell before anything runs."""
        for pairs in self.pairs:
            _check_book(pairs, self.letters, self.digits)
        if not self.pairs or not self.distances:
            raise UserError("phonebook: give at least one number of pairs and one distance")
        if min(self.distances) < 0:
            raise UserError(f"phonebook: distance must be 0 or more tokens, got {min(self.distances)}")
        if max(self.distances) > 0 and not self.distractor:
            raise UserError("phonebook: a distance above 0 needs distractor text; give a text file (--text)")
        if self.queries is not None and self.queries < 1:
            raise UserError(f"phonebook: queries must be at least 1 per sequence, got {self.queries}")
        if self.queries is not None and self.queries > min(self.pairs):
            raise UserError(
                f"phonebook: {self.queries} queries of distinct pairs need as many pairs, got pairs {min(self.pairs)}; "
                "ask for fewer queries or more pairs"
            )
        if self.queries is not None and self.length is not None:
            raise UserError("phonebook: give either a number of queries or a length to fill, not both")

    def cells(self, lengths: Sequence[int]) -> list[dict[str, int | float]]:
        """Return the cells to run; `lengths` plays no part: a phone book is as long as its pairs and distance."""
        del lengths
        return [{"pairs": pairs, "distance": distance} for distance in self.distances for pairs in self.pairs]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return how many answers a sequence of `cell` holds at least (exact unless `length` is set)."""
        return 1 if self.length is not None else self._queries(int(cell["pairs"]))

    def _queries(self, pairs: int) -> int:
        return self.queries if self.queries is not None else max(1, min(8, pairs // 2))

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Sample:
        """Return sample `index` of `cell`; the same bytes for the same arguments on every platform."""
        generator = sample_generator(seed, self.name, cell, index)
        pairs, distance = int(cell["pairs"]), int(cell["distance"])
        book = _draw_book(generator, encode, pairs, self.letters, self.digits)
        writer = _Writer()
        writer.add(encode.opening if self.opening else ())
        for pair in range(pairs):
            writer.add_line(book, pair, query=False, limit=None)
        if distance:
            writer.add(self._distraction(encode, generator, distance))
            writer.add(book.newline)
        if self.length is not None:
            shortest = len(writer.ids) + max(book.query_size(pair) for pair in range(pairs))
            if shortest > self.length:
                raise UserError(
                    f"phonebook: {pairs} pairs, distance {distance} and one query take {shortest} tokens, "
                    f"more than the length {self.length}"
                )
        queries = None if self.length is not None else self._queries(pairs)
        _ask(generator, writer, book, queries, self.length)
        return Sample(*writer.arrays(self.length))

    def _distraction(self, encode: PieceEncoder, generator: np.random.Generator, tokens: int) -> tuple[int, ...]:
        """Return exactly `tokens` tokens of the distractor text from a random start."""
        text = encode(self.distractor)
        if len(text) < tokens:
            raise UserError(
                f"phonebook: the distractor text has {len(text)} tokens, fewer than the distance {tokens}; "
                "give a longer text"
            )
        start = int(draw_integers(generator, len(text) - tokens + 1, ())[()])
        return text[start : start + tokens]
