r"""Synthetic copying: repeat a random string. How far beyond the trained lengths does it go?

A string of three letters, bytes as tokens (``.`` in the second row is a label of -100):

    input   $ q x b | q x b .
    label   . . . . . q x b .

Source: Jelassi et al., "Repeat After Me" (2024), section 4: ``$`` opens a string of letters drawn uniformly and
independently from a to z, ``|`` asks for it, ``.`` ends it. A training sequence holds many such strings, one after the
other, of lengths drawn uniformly; there the closing ``.`` is labelled too, and a string that the end of the sequence
cuts is not labelled at all. Unless `opening` is false, the tokenizer's beginning-of-text token, where it has one,
stands before everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.charts import LineChart, TaskSection, TrainedTo
from longrecall.tasks.declaration import (
    Declaration,
    Flag,
    HarnessForm,
    Headline,
    Make,
    ReportPart,
    TrainingSource,
)
from longrecall.tasks.encoding import IGNORE, Cell, PieceEncoder, Sample, TextEncoder, draw_integers, sample_generator
from longrecall.tasks.wording import Wording
from longrecall.value_rules import check_weight

Ints = NDArray[np.int64]

_BEGIN, _AGAIN, _END = "$|."
_MARKS = 3
"""Characters of an example beside its two copies of the string."""


def _check_lengths(lengths: tuple[int, int]) -> None:
    low, high = lengths
    if not 1 <= low <= high:
        raise UserError(f"copying: lengths must be (fewest, most) letters with 1 <= fewest <= most, got {lengths}")


def _draw_strings(generator: np.random.Generator, shape: tuple[int, ...]) -> Ints:
    """Return letters as ASCII codes, int64 of `shape`."""
    return draw_integers(generator, 26, shape) + ord("a")


def copying_byte_batch(
    generator: np.random.Generator, rows: int, length: int, lengths: tuple[int, int] = (5, 20)
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), both int64 [rows, length]: `copying_sequence` over bytes, all rows at once.

    There is no beginning-of-text token: that is for the caller to put in front. Raises `UserError` when the longest
    string and its copy do not fit into `length`.
    """
    _check_lengths(lengths)
    low, high = lengths
    if rows < 1:
        raise UserError(f"copying: rows must be at least 1, got {rows}")
    if 2 * high + _MARKS > length:
        raise UserError(
            f"copying: a string of {high} letters and its copy take {2 * high + _MARKS} bytes, more than the length "
            f"{length}; use a longer length or shorter strings"
        )
    examples = -(-length // (2 * low + _MARKS))
    letters = low + draw_integers(generator, high - low + 1, (rows, examples))
    strings = _draw_strings(generator, (rows, examples, high))
    ends = np.cumsum(2 * letters + _MARKS, axis=1)

    opened = np.zeros((rows, length), dtype=np.int64)
    row, example = np.nonzero(ends < length)
    opened[row, ends[row, example]] = 1
    index = np.cumsum(opened, axis=1)
    size = np.take_along_axis(letters, index, axis=1)
    end = np.take_along_axis(ends, index, axis=1)
    offset = np.arange(length) - (end - 2 * size - _MARKS)

    # Where the string starts again, the letters do: both copies read the same table.
    place = np.where(offset <= size, offset - 1, offset - size - 2)
    flat = (np.arange(rows)[:, None] * examples + index) * high + np.clip(place, 0, high - 1)
    ids = strings.reshape(-1)[flat]
    ids[offset == 0] = ord(_BEGIN)
    ids[offset == size + 1] = ord(_AGAIN)
    ids[offset == 2 * size + 2] = ord(_END)
    return ids, np.where((offset >= size + 2) & (end <= length), ids, IGNORE)


def _spell(encode: PieceEncoder, codes: Ints) -> list[int]:
    return [token for code in codes for token in encode(chr(code))]


def copying_sequence(
    generator: np.random.Generator,
    tokenizer: TextEncoder | PieceEncoder,
    length: int,
    lengths: tuple[int, int] = (5, 20),
    opening: bool = True,
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), int64 [length] each: one training sequence of exactly `length` tokens.

    `lengths`: fewest and most letters of a string (uniform, both ends included). `opening`: begin with the tokenizer's
    beginning-of-text token, which counts in `length`. Pass a `PieceEncoder` to share its memory between calls. Raises
    `UserError` when the longest string and its copy do not fit.
    """
    _check_lengths(lengths)
    low, high = lengths
    encode = tokenizer if isinstance(tokenizer, PieceEncoder) else PieceEncoder(tokenizer)
    ids = list(encode.opening) if opening else []
    widest = max(len(encode(chr(code))) for code in range(ord("a"), ord("z") + 1))
    longest = len(ids) + 2 * high * widest + sum(len(encode(mark)) for mark in (_BEGIN, _AGAIN, _END))
    if longest > length:
        raise UserError(
            f"copying: a string of {high} letters and its copy can take {longest} tokens, more than the length "
            f"{length}; use a longer length or shorter strings"
        )
    labels = [IGNORE] * len(ids)
    while len(ids) < length:
        count = low + int(draw_integers(generator, high - low + 1, ())[()])
        string = _spell(encode, _draw_strings(generator, (count,)))
        asked = [*encode(_BEGIN), *string, *encode(_AGAIN)]
        answer = [*string, *encode(_END)]
        whole = len(ids) + len(asked) + len(answer) <= length
        ids += asked + answer
        labels += [IGNORE] * len(asked) + (answer if whole else [IGNORE] * len(answer))
    return np.array(ids[:length], dtype=np.int64), np.array(labels[:length], dtype=np.int64)


@dataclass(frozen=True)
class CopyingSource(TrainingSource):
    """Random strings, each followed by its copy; only the copies are labelled."""

    kind: ClassVar[str] = "copying"

    lengths: tuple[int, int] = (5, 20)
    """Fewest and most letters of a string; uniform between them."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        """Check the fields before anything runs."""
        check_weight(self.weight)
        if not 1 <= self.lengths[0] <= self.lengths[1]:
            raise UserError(f"lengths must be [fewest, most] with 1 <= fewest <= most, got {list(self.lengths)}")

    def sequences(self, pieces: PieceEncoder) -> Make:
        """Return the function that makes a training sequence."""
        return lambda generator, length: copying_sequence(generator, pieces, length, self.lengths)


def _headlines(cells: Sequence[Mapping[str, Any]]) -> list[Headline]:
    longest = max(cell["length"] for cell in cells)
    return [Headline(f"copying: strings of {longest:,} letters", part={"length": longest})]


_CHART = LineChart(
    along="length",
    title="Copying: share copied rightly by length of the string, a line per result file",
    axis="letters of the string",
    share="share copied",
    caption="Share of random strings, and of their letters, that are copied rightly. Bars are 95% intervals.",
    reading="How to read it: the further right a line stays high, the longer the strings that are copied.",
    metrics={"accuracy": "whole strings", "character_accuracy": "single letters"},
    trained=TrainedTo(
        "trained",
        "lengths",
        "How to read it: a line that stays high to the right of the dotted mark copies strings longer than it was "
        "trained on.",
    ),
)
_SECTION = TaskSection("Copying by length", (_CHART,))


@dataclass(frozen=True)
class Copying:
    """The evaluation task: cells ``{"length"}``, the letters of the string; one string per sample.

    An answer is right when every letter is (the published string accuracy); `token_metric` counts single letters. Both
    are read off one pass with the true string fed in, as published. The closing mark is not scored. `trained`: the
    longest string of training, in letters; it changes nothing but the mark in the report. `opening`: begin with the
    tokenizer's beginning-of-text token, where it has one.
    """

    trained: int | None = None
    opening: bool = True

    name: ClassVar[str] = "copying"
    wording: ClassVar[Wording] = Wording(
        "copying",
        "The model reads a string of random letters and must repeat it letter by letter.",
        lambda cell: f"for {cell['length']} letters",
    )
    declared: ClassVar[Declaration] = Declaration(
        flags=(
            Flag("--copy-trained", "trained", "N", "longest string of training in letters, which the report marks"),
        ),
        length_unit="letters",
        source=CopyingSource,
        harness=HarnessForm(1024, (".",)),
        report=ReportPart(("accuracy", "character_accuracy"), ("length",), headlines=_headlines, section=_SECTION),
    )
    token_metric: ClassVar[str] = "character_accuracy"

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        if self.trained is not None and self.trained < 1:
            raise UserError(f"copying: the longest trained string must have at least 1 letter, got {self.trained}")

    def cells(self, lengths: Sequence[int]) -> list[dict[str, int | float]]:
        """Return one cell per length, in letters."""
        return [{"length": length} for length in lengths]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return how many answers a sequence of `cell` holds."""
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Sample:
        """Return sample `index` of `cell`; the same bytes for the same arguments on every platform."""
        letters = int(cell["length"])
        if letters < 1:
            raise UserError(f"copying: a string needs at least 1 letter, got length {letters}")
        string = _spell(encode, _draw_strings(sample_generator(seed, self.name, cell, index), (letters,)))
        before = [*(encode.opening if self.opening else ()), *encode(_BEGIN), *string, *encode(_AGAIN)]
        ids = np.array([*before, *string, *encode(_END)], dtype=np.int64)
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        labels[len(before) : len(before) + len(string)] = string
        return Sample(ids, labels)
