"""The closing table of the demo: before, after and the control, with intervals, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.evaluation.verdict import CONTROL as ABOUT_CONTROL
from longrecall.evaluation.verdict import all_in_words
from longrecall.tables import aligned
from longrecall.tasks.registry import wording_of

Result = Mapping[str, Any]
BEFORE, AFTER, CONTROL = "before", "after", "control (same state)"
"""What the table and the report call the three measurements."""
SHOWN = ("accuracy", "bits_per_byte")


def closing_table(before: Result, after: Result, control: Result) -> str:
    """Recall by number of pairs and by length, bits per byte by position: value, 95% interval and count."""
    rows = [["", "answers", BEFORE, AFTER, CONTROL]]
    for cell in before["results"]:
        if cell["metric"] not in SHOWN:
            continue
        row = [_name(cell), f"{cell['count']:,}"]
        rows.append(row + [_value(_find(result, cell)) for result in (before, after, control)])
    sizes = [f"{result['checkpoint']['state_size']:,}" for result in (before, after, control)]
    rows.append(["numbers in the state", "", *sizes])
    parts = (aligned(rows, left=1), explanations(before), [verdict(before, after, control)])
    return "\n\n".join("\n".join(part) for part in parts)


def verdict(before: Result, after: Result, control: Result) -> str:
    """What got better, what got worse and what cannot be told, after against before and against the control.

    The same sentences open the report (`longrecall.evaluation.verdict`).
    """
    compared = all_in_words(
        [(before, after, (BEFORE, AFTER), ""), (control, after, (CONTROL, AFTER), ABOUT_CONTROL)],
    )
    return "\n\n".join("\n".join(found.lines) for found in compared)


def explanations(result: Result) -> list[str]:
    """What each task of a result asks of a model, a line each."""
    tasks = dict.fromkeys(cell["task"] for cell in result["results"])
    return [f"{words.title}: {words.explanation}" for words in map(wording_of, tasks)]


def _find(result: Result, like: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        cell
        for cell in result["results"]
        if (cell["task"], cell["cell"], cell["metric"]) == (like["task"], like["cell"], like["metric"])
    )
    return found


def _name(cell: Mapping[str, Any]) -> str:
    words = wording_of(cell["task"])
    return f"{words.title} {words.place(cell['cell'])}"


def _value(cell: Mapping[str, Any]) -> str:
    if cell["value"] is None:
        return "diverged"
    if cell["low"] is None:
        return f"{cell['value']:.3f}"
    return f"{cell['value']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
