"""docs/length_generalization.md with its folder, and what it was made from, for the tests of these pages."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.common import pages
from experiments.length import records, report

SLOW_WELL = "slow_gla_k16:1"
"""The model with slow gates that is not ill."""
CURES = ("state_passing", "state_passing_text", "truncated_bptt")


def page_text() -> str:
    """The pages of the study, one after the other."""
    return "\n".join(path.read_text(encoding="utf-8") for path in pages.pages_of(report.PAGE))


def page_prose() -> str:
    """The same without its tables, as one line."""
    return " ".join(" ".join(line for line in page_text().split("\n") if not line.startswith("|")).split())


def mean(model: str, arm: str, name: str) -> float:
    return statistics.mean(records.MEASURES[name](row) for row in records.rows_of(records.record_of(model), model, arm))


def variants() -> dict[tuple[str, str], dict[str, Any]]:
    """Every model before post-training, by run and name."""
    return {
        (run, name): row for run, file in records.RUNS.items() for name, row in pages.read(file)["variants"].items()
    }


def last_doubling(rows: list[dict[str, Any]]) -> list[list[float]]:
    """[layer][head]: norm at 64k over that at 32k, mean over the models."""
    assert all(row["state"]["positions"][-2:] == [32768, 65536] for row in rows)
    ratios = [[[h["norm"][-1] / h["norm"][-2] for h in x["heads"]] for x in row["state"]["layers"]] for row in rows]
    return [[statistics.mean(head) for head in zip(*layer, strict=True)] for layer in zip(*ratios, strict=True)]


def over(model: str, arm: str, name: str) -> tuple[float, float]:
    """What an arm adds to plain continued training, and half its interval."""
    centre, half = records.differences(records.record_of(model), model, arm, name)
    return centre, half


def heads(row: dict[str, Any]) -> list[float]:
    return [value for layer in records.growth(row) for value in layer]
