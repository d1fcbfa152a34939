"""What a task is called and what it asks, in words for people who meet it in a table or a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_LISTED = 8


def listed(numbers: Sequence[float]) -> str:
    """Return numbers as a list, or as a range where they are many."""
    if len(numbers) > _MOST_LISTED:
        return f"{len(numbers)} numbers from {numbers[0]:g} to {numbers[-1]:g}"
    return ", ".join(f"{number:g}" for number in numbers)


def plain_place(cell: Mapping[str, Any]) -> str:
    """Return a cell as it stands in the result file: ``task qa1, length 512``."""
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in cell.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())


def length_place(cell: Mapping[str, Any]) -> str:
    """Return the cell of a task that hides something in a text: ``in 512 tokens, depth 0.5``, and what else it says."""
    length, depth = cell.get("length"), cell.get("depth")
    rest = plain_place({key: value for key, value in cell.items() if key not in ("length", "depth")})
    words = (rest, f"in {length} tokens" if length is not None else "", f"depth {depth:g}" if depth is not None else "")
    return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Wording:
    """The words of one task.

    `title` is its name (`phone book`), `explanation` what it asks of a model (whole sentences, one is best), `place`
    says in a few words where a cell of it was measured. `shared` says that its cells judge the same units (the windows
    of one text, say), which are then no independent evidence.
    """

    title: str
    explanation: str
    place: Callable[[Mapping[str, Any]], str] = plain_place
    shared: bool = False
