"""Plain-text tables for the terminal, in which equal rows are one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

NUMBERS_WIDTH = 32
"""Characters of a cell of row numbers; more go into lines below."""


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows as lines of equal columns: the first `left` columns flush left, the others flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def in_runs(numbers: Iterable[int]) -> str:
    """Rising numbers with neighbours joined: ``1-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def groups(rows: Iterable[Hashable]) -> list[list[int]]:
    """The numbers of equal rows together, in the order of the first of each."""
    found: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(row, []).append(number)
    return list(found.values())


def grouped(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Each different row once, with the numbers of those that are like it in a cell before the others."""
    table: list[tuple[str, ...]] = []
    for numbers in groups(rows):
        first, *more = _in_lines(in_runs(numbers))
        row = rows[numbers[0]]
        table += [(first, *row), *((line, *("" for _ in row)) for line in more)]
    return table


def _in_lines(numbers: str) -> list[str]:
    """Runs of numbers in lines of at most `NUMBERS_WIDTH` characters."""
    lines = [""]
    for run in numbers.split(","):
        if len(lines[-1]) + len(run) >= NUMBERS_WIDTH:
            lines.append("")
        lines[-1] += f"{run},"
    lines[-1] = lines[-1].removesuffix(",")
    return lines
