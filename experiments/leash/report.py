"""Turn the recorded runs into the tables of docs/training/leash.md.

Usage: python -m experiments.leash.report            rewrites what stands between the markers
       python -m experiments.leash.report --check    changes nothing; exit code 1 when a table is out of date
"""

from __future__ import annotations

from functools import partial
from typing import Any

from experiments.common import pages
from experiments.common.pages import number, read, signed_with_error, table
from experiments.leash.records import (
    BASE,
    FILE,
    NONE,
    SEEDS,
    Measure,
    Value,
    answers_apart,
    arms,
    bits,
    rows_of,
    seeds_apart,
    share,
)

PAGE = "training/leash.md"
DEPTHS = ("0.0", "0.5", "1.0")
BITS = "bits 2k–4k"
MEASURES: dict[str, Measure] = {
    "24 pairs": lambda rows: share(rows, "pairs:24"),
    "8 pairs": lambda rows: share(rows, "pairs:8"),
    BITS: partial(bits, span="2048-4096"),
    "keys in 512": lambda rows: share(rows, *(f"keys:512:{depth}" for depth in DEPTHS)),
    "keys in 1024": lambda rows: share(rows, *(f"keys:1024:{depth}" for depth in DEPTHS)),
    "of them at the start": lambda rows: share(rows, "keys:1024:0.0"),
}
"""Columns of the tables."""
KEYS = ("keys in 512", "keys in 1024", "of them at the start")
MOST_BITS = 0.03
"""Above the base, that were asked for."""
SUITE = "text+passkey"
"""Sources of every leash on record; the page says it once."""
OPTIONS = {"h": "hidden {}", "t": "temperature {}", "k": "top k {}", "l": "length {}"}
CHANGES = {
    "optimizer.learning_rate": "rate {}",
    "optimizer.touched": "touched {}",
    "data.sources.0.weight": "text {}",
    "data.sources.3.weight": "pass keys {}",
    "data.context_length": "rows of {}",
    "run.batch_size": "{} a batch",
    "run.steps": "{} steps",
}
"""What the table calls a key of the recipe that an arm changes."""


def words(arm: str) -> str:
    """What the tables call an arm of `experiment.py`."""
    if arm in (BASE, NONE):
        return {BASE: "before", NONE: "no leash"}[arm]
    leash, _, keys = arm.partition("@")
    sources, weight, *options = leash.split(":")
    found = [*([] if sources == SUITE else [sources.replace("+", " and ")]), f"weight {weight}"]
    if "instead" not in options:
        found.append("beside the loss")
    found += [OPTIONS[option[0]].format(option[1:]) for option in options if option != "instead"]
    for name, value in (key.split("=") for key in filter(None, keys.split(","))):
        found.append(CHANGES[name].format(value))
    return ", ".join(found)


def shown(value: Value) -> str:
    """Value and interval."""
    return f"{number(value[0])} [{number(value[1])}, {number(value[2])}]"


def apart(value: Value) -> str:
    """A difference and its interval."""
    return f"{number(value[0], signed=True)} [{number(value[1], signed=True)}, {number(value[2], signed=True)}]"


def arms_table(record: dict[str, Any]) -> str:
    """Every arm, its runs together."""
    lines = []
    for arm in arms(record):
        rows = rows_of(record, arm)
        lines.append([words(arm), str(len(rows)), *(shown(measure(rows)) for measure in MEASURES.values())])
    return table(["arm", "runs", *MEASURES], lines, texts=1)


def three_seeds(record: dict[str, Any]) -> list[str]:
    """The leashes that have as many seeds as a difference over seeds takes."""
    return [arm for arm in arms(record) if arm not in (BASE, NONE) and len(rows_of(record, arm)) == SEEDS]


def seeds_table(record: dict[str, Any]) -> str:
    """Differences over three seeds, each seed's runs against each other."""
    lines = []
    pairs = [(NONE, BASE), *((arm, other) for arm in three_seeds(record) for other in (BASE, NONE))]
    for arm, other in pairs:
        found = [seeds_apart(record, arm, other, measure) for measure in MEASURES.values()]
        lines.append([f"{words(arm)} − {words(other)}", *(signed_with_error(*pair) for pair in found)])
    return table(["difference", *MEASURES], lines, texts=1)


def wishes(record: dict[str, Any], arm: str) -> dict[str, bool]:
    """Which of the three wishes the runs of an arm meet, by the intervals of their answers.

    Recall among 24 pairs is no lower than without a leash (same seeds), bits are at most `MOST_BITS` above the base,
    and of pass keys none of the three columns is lower than the base's. What an interval reaches is not lower.
    """
    pairs = answers_apart(record, arm, NONE, MEASURES["24 pairs"])
    more = answers_apart(record, arm, BASE, MEASURES[BITS])
    keys = [answers_apart(record, arm, BASE, MEASURES[name]) for name in KEYS]
    return {
        "recall": pairs[2] >= 0,
        "bits": more[0] <= MOST_BITS,
        "pass keys": all(high >= 0 for _, _, high in keys),
    }


def wishes_table(record: dict[str, Any]) -> str:
    """What each arm lost or kept against what was asked, and which wishes it meets."""
    lines = []
    for arm in arms(record)[1:]:
        pairs = "" if arm == NONE else apart(answers_apart(record, arm, NONE, MEASURES["24 pairs"]))
        more = number(answers_apart(record, arm, BASE, MEASURES[BITS])[0], signed=True, digits=4)
        keys = [apart(answers_apart(record, arm, BASE, MEASURES[name])) for name in (KEYS[0], KEYS[2])]
        met = ", ".join(name for name, holds in wishes(record, arm).items() if holds)
        lines.append([words(arm), str(len(rows_of(record, arm))), pairs, more, *keys, met or "none"])
    heads = [
        "arm",
        "runs",
        "24 pairs − no leash",
        f"{BITS} − before",
        "keys in 512 − before",
        "at the start of 1024 − before",
    ]
    return table([*heads, "meets"], lines, texts=1)


def tables() -> dict[str, str]:
    """Every table of the page by its name."""
    record = read(FILE)
    return {"leash wishes": wishes_table(record), "leash seeds": seeds_table(record), "leash": arms_table(record)}


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables)
