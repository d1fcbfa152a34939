"""Turn the recorded answers into the table of docs/kernels/decoding.md.

Usage: python -m experiments.number_formats.report            rewrites what stands between the markers
       python -m experiments.number_formats.report --check    changes nothing; exit code 1 when the table is out of date

Differences are paired, text by text: all forms of a model got the same. Intervals are 95% over texts
(`longrecall.evaluation.paired`).
"""

from __future__ import annotations

from typing import Any

from experiments.common import pages
from experiments.common.pages import number, read, table
from longrecall.evaluation.paired import paired_interval

PAGE = "kernels/decoding.md"
RECORD = "number_formats.json"
WHOLE, STEPPED = "as stored", "token by token"
COMPARED = {
    "bf16 states": STEPPED,
    "int8 weights": WHOLE,
    "fp8 weights": WHOLE,
    "int8 weights, bf16 states": STEPPED,
}
"""Each form beside the one that is read in the same way, which is what it is compared with."""
NAMES = {"gla-base": "GLA", "mamba2-base": "Mamba-2"}
TASKS = {"pairs": "{} pairs", "pass key": "key at {}", "copying": "copying {}"}
CHANCE = ("copying",)
"""What neither base was trained for, nor can do: no table shows it."""


def rows() -> list[dict[str, Any]]:
    """Every measurement of what the models can do."""
    return [row for row in read(RECORD)["results"] if row["task"] not in CHANCE]


def share(row: dict[str, Any]) -> float:
    """Right answers among all."""
    return sum(row["right"]) / row["asked"] / len(row["right"])


def difference(first: dict[str, Any], second: dict[str, Any]) -> tuple[float, float, float]:
    """Of the shares of two forms on the same texts, and its interval."""
    assert [first[k] for k in ("checkpoint", "task", "cell")] == [second[k] for k in ("checkpoint", "task", "cell")]
    found = paired_interval(first["right"], second["right"], [first["asked"]] * len(first["right"]), counted=True)
    assert found is not None
    return share(second) - share(first), *found


def cell(first: dict[str, Any], second: dict[str, Any]) -> str:
    """A difference as the table shows it, bold where its interval leaves out zero."""
    mean, low, high = difference(first, second)
    text = f"{number(mean, signed=True)} ({number(low, signed=True)} to {number(high, signed=True)})"
    return f"**{text}**" if low > 0 or high < 0 else text


Key = tuple[str, str, str]


def by_question() -> dict[Key, dict[str, dict[str, Any]]]:
    """Measurements by checkpoint, task and cell, then by form."""
    found: dict[Key, dict[str, dict[str, Any]]] = {}
    for row in rows():
        found.setdefault((row["checkpoint"], row["task"], row["cell"]), {})[row["form"]] = row
    return found


def tables() -> dict[str, str]:
    """The tables by name."""
    lines = []
    for (checkpoint, task, of), forms in by_question().items():
        shares = [number(share(forms[form])) for form in (WHOLE, STEPPED)]
        shown = [cell(forms[first], forms[form]) for form, first in COMPARED.items()]
        lines.append([NAMES[checkpoint], TASKS[task].format(of), *shares, *shown])
    return {"number formats": table(["base", "task", WHOLE, STEPPED, *COMPARED], lines)}


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables)
