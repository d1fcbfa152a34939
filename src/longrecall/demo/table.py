"""The closing table of the demo: before, after and the control, with intervals, and one sentence of verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.tables import aligned

Result = Mapping[str, Any]
SHOWN = ("accuracy", "bits_per_byte")


def closing_table(before: Result, after: Result, control: Result) -> str:
    """Recall by number of pairs and by length, bits per byte by position: value, 95% interval and count."""
    rows = [["", "answers", "before", "after", "trained on, same state"]]
    for cell in before["results"]:
        if cell["metric"] not in SHOWN:
            continue
        row = [_name(cell), f"{cell['count']:,}"]
        rows.append(row + [_value(_find(result, cell)) for result in (before, after, control)])
    sizes = [f"{result['checkpoint']['state_size']:,}" for result in (before, after, control)]
    rows.append(["numbers in the state", "", *sizes])
    return "\n".join([*aligned(rows, left=1), "", verdict(before, after, control)])


def verdict(before: Result, after: Result, control: Result) -> str:
    """Where recall went, whether the intervals lie apart, and what the rest of the model paid for it."""
    return f"{_gain(before, after, control)}\n{_cost(before, after, control)}"


def _gain(before: Result, after: Result, control: Result) -> str:
    cells = [cell for cell in before["results"] if cell["task"] == "phonebook"]
    gains = [(_find(after, cell), _find(control, cell), cell) for cell in cells]
    whole = [gain for gain in gains if all(cell["value"] is not None for cell in gain)]
    clear = [(a, c, b) for a, c, b in whole if a["low"] > c["high"] and a["low"] > b["high"]]
    if not clear:
        return "At this budget no number of pairs shows a gain larger than its interval; give it more --steps."
    best_after, best_control, best = max(clear, key=lambda gain: gain[0]["value"] - gain[1]["value"])
    return (
        f"Recall among {best['cell']['pairs']} pairs: {best['value']:.0%} before, {best_after['value']:.0%} after; "
        f"training on without a larger state gives {best_control['value']:.0%}. "
        f"The intervals lie apart at {len(clear)} of {len(gains)} numbers of pairs."
    )


def _cost(before: Result, after: Result, control: Result) -> str:
    """Means over the cells of the other tasks; a task that is missing or diverged is left out."""
    parts = []
    rest = (("bits per byte", "bits_per_byte", "bits_per_byte"), ("pass keys", "passkey", "accuracy"))
    for name, task, metric in rest:
        means = [_mean(result, task, metric) for result in (before, after, control)]
        if None not in means:
            parts.append(f"{name} {means[0]:.2f} before, {means[1]:.2f} after, {means[2]:.2f} with the same state")
    return "In so few steps the rest pays for it: " + "; ".join(parts) + "." if parts else ""


def _mean(result: Result, task: str, metric: str) -> float | None:
    values = [c["value"] for c in result["results"] if c["task"] == task and c["metric"] == metric]
    return None if not values or None in values else sum(values) / len(values)


def _find(result: Result, like: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        cell
        for cell in result["results"]
        if (cell["task"], cell["cell"], cell["metric"]) == (like["task"], like["cell"], like["metric"])
    )
    return found


def _name(cell: Mapping[str, Any]) -> str:
    place = cell["cell"]
    if cell["task"] == "phonebook":
        far = f", {place['distance']} tokens away" if place["distance"] else ""
        return f"recall among {place['pairs']} pairs{far}"
    if cell["task"] == "passkey":
        return f"pass key in {place['length']} tokens, depth {place['depth']:g}"
    return f"{cell['metric'].replace('_', ' ')}, tokens {place['start']} to {place['end']}"


def _value(cell: Mapping[str, Any]) -> str:
    if cell["value"] is None:
        return "diverged"
    if cell["low"] is None:
        return f"{cell['value']:.3f}"
    return f"{cell['value']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
