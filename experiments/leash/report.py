"""Turn the recorded runs into the table of docs/training/leash.md.

Usage: python -m experiments.leash.report            rewrites what stands between the markers
       python -m experiments.leash.report --check    changes nothing; exit code 1 when the table is out of date
"""

from __future__ import annotations

from experiments.common import pages
from experiments.common.pages import number, read, table
from experiments.leash.records import FILE, Row, Value, arms, bits, rows_of, share

PAGE = "training/leash.md"
HEAD = ["arm", "runs", "24 pairs", "8 pairs", "bits 2k–4k", "keys in 512", "keys in 1024", "of them at the start"]
DEPTHS = ("0.0", "0.5", "1.0")


def words(arm: str) -> str:
    """What the table calls an arm of `experiment.py`."""
    if arm in ("base", "none"):
        return {"base": "before", "none": "no leash"}[arm]
    leash, _, keys = arm.partition("@")
    sources, weight, *options = leash.split(":")
    rest = [{"instead": "instead of the loss"}.get(option, f"hidden {option[1:]}") for option in options]
    for name, value in (key.split("=") for key in filter(None, keys.split(","))):
        rest.append(f"{name.rpartition('.')[2].replace('_', ' ')} {value}")
    return ", ".join([sources.replace("+", " and "), f"weight {weight}", *rest])


def shown(value: Value) -> str:
    """Value and interval."""
    return f"{number(value[0])} [{number(value[1])}, {number(value[2])}]"


def line(arm: str, rows: list[Row]) -> list[str]:
    """One line of the table."""
    cells = [
        share(rows, "pairs:24"),
        share(rows, "pairs:8"),
        bits(rows, "2048-4096"),
        share(rows, *(f"keys:512:{depth}" for depth in DEPTHS)),
        share(rows, *(f"keys:1024:{depth}" for depth in DEPTHS)),
        share(rows, "keys:1024:0.0"),
    ]
    return [words(arm), str(len(rows)), *map(shown, cells)]


def tables() -> dict[str, str]:
    """Every table of the page by its name."""
    record = read(FILE)
    return {"leash": table(HEAD, [line(arm, rows_of(record, arm)) for arm in arms(record)], texts=1)}


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables)
