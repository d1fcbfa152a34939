"""How well a model predicts text, by position: cells are ranges of token positions within windows of the text.

With ``first = 4`` and windows of 16 tokens (a digit = the index of the cell that scores the token; position 0 has
nothing before it and is not scored):

    position  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    cell      .  0  0  0  1  1  1  1  2  2  2  2  2  2  2  2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.charts import RangeChart, TaskSection
from longrecall.tasks.declaration import Declaration, Flag, Headline, ReportPart
from longrecall.tasks.wording import Wording


def _headlines(cells: Sequence[Mapping[str, Any]]) -> list[Headline]:
    """Return the first and the last range of positions."""
    ends = sorted({(cell["start"], cell["end"]) for cell in cells})
    return [
        Headline(
            f"bits per byte at positions {start:,.0f} to {end:,.0f}",
            metric="bits_per_byte",
            part={"start": start},
            more_is_better=False,
        )
        for start, end in dict.fromkeys([*ends[:1], *ends[-1:]])
    ]


_CHART = RangeChart(
    name="positions",
    axis="position in the text, in tokens",
    quantity="bits per byte (lower is better)",
    metric="bits_per_byte",
    title="Bits per byte by position in the text, a line per result file; lower is better",
    caption="How well running text is predicted, by position in it. Bars are 95% intervals.",
    reading="How to read it: lower is better. If a curve rises to the right, the model fails on texts longer than it "
    "was trained on.",
)
_SECTION = TaskSection("Bits per byte by position", (_CHART,), anchor="positions")


@dataclass(frozen=True)
class BitsPerByte:
    """The evaluation task: cells ``{"start", "end"}``, positions in [start, end), doubling from `first` on.

    `text` is read as non-overlapping windows of the longest length asked for; at most `windows` of them, spread evenly
    over the text.
    """

    text: str = field(default="", repr=False)
    first: int = 256
    windows: int = 64

    name: ClassVar[str] = "bits_per_byte"
    wording: ClassVar[Wording] = Wording(
        "bits per byte",
        "How well the model predicts ordinary text, measured at each distance from its beginning; fewer bits "
        "are better.",
        lambda cell: f"at tokens {cell['start']} to {cell['end']}",
        shared=True,
    )
    declared: ClassVar[Declaration] = Declaration(
        flags=(Flag("--windows", "windows", "N", "windows of text at most"),),
        text_option="text",
        averaged=False,
        pooled="bits_per_byte",
        reads_longest=True,
        report=ReportPart(("bits_per_byte",), ("start", "end"), (), _headlines, _SECTION, shares=False),
    )

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        if not self.text:
            raise UserError("bits_per_byte needs text; give a text file (--text)")
        if self.first < 2:
            raise UserError(f"bits_per_byte: the first range must end at position 2 or later, got {self.first}")
        if self.windows < 1:
            raise UserError(f"bits_per_byte: windows must be at least 1, got {self.windows}")

    def cells(self, lengths: Sequence[int]) -> list[dict[str, int | float]]:
        """Return the ranges up to the longest of `lengths` (tokens)."""
        longest = max(lengths)
        if longest < 2:
            raise UserError(f"bits_per_byte: length {longest} is too short; the first token has nothing before it")
        edges = [0]
        while edges[-1] < longest:
            edges.append(min(longest, max(self.first, 2 * edges[-1])))
        return [{"start": start, "end": end} for start, end in pairwise(edges)]

    def window_starts(self, tokens: int, length: int, samples: int) -> NDArray[np.int64]:
        """Return the first token of each window: at most `samples`, none overlapping, evenly spread over `tokens`."""
        available = tokens // length
        if available < 1:
            raise UserError(
                f"bits_per_byte: the text has {tokens} tokens, fewer than the length {length}; "
                "give a longer text or shorter lengths"
            )
        count = min(samples, self.windows, available)
        return np.arange(count, dtype=np.int64) * available // count * length
