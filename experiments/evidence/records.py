"""The recorded models of docs/evidence.md: which rows an arm has, and what is read off a row.

A share of three models (one per seed) has the Student t interval over the models, 2 degrees of freedom, widened to the
Wilson interval of the pooled counts where that is wider. The Wilson interval counts effective answers, since answers of
one phone book hang together.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from experiments.common.intervals import t_interval
from longrecall.evaluation.statistics import wilson_interval

ARMS = ("plain", "reinit", "inherit", "preserve", "perturb", "handover")
STUDIES = {"mamba2": "post_training_mamba2.json", "gla": "post_training_gla.json"}
Study = dict[str, Any]
Row = dict[str, Any]


def rows_of(study: Study, arm: str, passing: bool | None) -> list[Row]:
    """The models of one arm in the order of their seeds; the base has no `state_passing` (None)."""
    found = [r for r in study["results"] if r["arm"] == arm and r.get("state_passing") == passing]
    return sorted(found, key=lambda r: r.get("seed", 0))


def variants(study: Study) -> list[tuple[str, bool | None]]:
    """The lines of a table: the base as it was, then every arm without and with state passing."""
    return [("base", None)] + [(arm, passing) for arm in ARMS for passing in (False, True)]


def answers(row: Row, task: str, cell: str) -> tuple[int, int, float]:
    """(right, asked, effective number of answers) of one model in one cell."""
    right, asked, *error = row[task][cell]
    share = right / asked
    independent = share * (1 - share) / asked
    effect = max(1.0, error[0] ** 2 / independent) if error and independent else 1.0
    return right, asked, asked / effect


def share(rows: list[Row], task: str, cell: str) -> tuple[float, float, float, int]:
    """(share of right answers, low, high, answers) pooled over the models of `rows`."""
    counts = [answers(row, task, cell) for row in rows]
    right, asked, effective = (sum(c[i] for c in counts) for i in range(3))
    value = right / asked
    low, high = wilson_interval(value * effective, effective)
    if len(rows) == 3:
        centre, half = t_interval([c[0] / c[1] for c in counts])
        low, high = min(low, centre - half), max(high, centre + half)
    return value, max(0.0, low), min(1.0, high), int(asked)


def value(study: Study, row: Row, task: str, cell: str) -> float:
    """Share of right answers of one model in one cell, or its bits per byte in one range of positions."""
    if task == "bits_per_byte":
        return row[task][spans(study).index(cell)][0]
    right, asked = row[task][cell][:2]
    return right / asked


def spans(study: Study) -> list[str]:
    """Names of the ranges of positions."""
    names = [f"{e // 1024}k" if e >= 1024 else str(e) for e in study["settings"]["edges"]]
    return [f"{a}–{b}" for a, b in itertools.pairwise(names)]


def bits(rows: list[Row]) -> list[float]:
    """Bits per byte in each range, mean over the models."""
    return [statistics.mean(v) for v in zip(*([b for b, _ in row["bits_per_byte"]] for row in rows), strict=True)]
