"""The tables of docs/retrieval_evidence/bits_per_byte.md, for report.py.

Differences are paired: the same excerpts, the same seed, the same batches in training. An interval is 95% over excerpts
and says nothing about other seeds; that is what the two seeds side by side are for.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from experiments.common.pages import number, read, signed_with_error, table

RECORD = "perplexity_at_equal_parameters.json"
MIXERS = {"gla": "GLA", "gated_delta_net": "Gated DeltaNet", "mamba2": "Mamba-2"}
ARMS = {
    "plain": "plain",
    "wide": "plain, wider MLPs",
    "weighted": "retrieval, weighted",
    "hard": "retrieval, hard",
}
PAIRS = ("weighted - plain", "hard - plain", "wide - plain", "weighted - wide", "hard - wide")
NORMAL = 1.959964
"""97.5% quantile of the normal distribution: there are hundreds of excerpts."""
Record = dict[str, Any]


def bits_table(record: Record) -> str:
    """Parameters and bits per byte of every model, seed by seed, and over the ranges of positions."""
    lines = []
    for mixer, arm in itertools.product(MIXERS, ARMS):
        rows = [row for row in record["results"] if (row["mixer"], row["arm"]) == (mixer, arm)]
        rows.sort(key=lambda row: row["seed"])
        found = ", ".join(number(row["bits_per_byte"]["all"][0], digits=4) for row in rows)
        columns = zip(*(row["bits_per_byte"]["ranges"] for row in rows), strict=True)
        ranges = [number(statistics.mean(mean for mean, _ in column), digits=4) for column in columns]
        lines.append([MIXERS[mixer], ARMS[arm], f"{rows[0]['parameters']:,}", found, *ranges])
    return table(["mixer", "arm", "parameters", "all, by seed", *ranges_of(record)], lines)


def ranges_of(record: Record) -> list[str]:
    """Names of the ranges of positions."""
    return [f"{a}–{b}" for a, b in itertools.pairwise(record["edges"])]


def difference(record: Record, mixer: str, pair: str) -> tuple[list[list[float]], list[list[list[float]]]]:
    """[mean, standard error] of a paired difference, seed by seed: over all positions, and over each range."""
    found = [d["pairs"][pair] for d in sorted(record["differences"], key=lambda d: d["seed"]) if d["mixer"] == mixer]
    return [one["all"] for one in found], [one["ranges"] for one in found]


def over_seeds(values: list[list[float]]) -> tuple[float, float]:
    """Mean over seeds of [mean, standard error], and the half width of its 95% interval over excerpts.

    All seeds read the same excerpts, so that their errors do not cancel: the widths are averaged as well.
    """
    return statistics.mean(mean for mean, _ in values), NORMAL * statistics.mean(error for _, error in values)


def cell(seeds: list[list[float]]) -> str:
    """Mean over seeds ± half width; bold where that leaves out zero and all seeds agree on the sign."""
    text = signed_with_error(*over_seeds(seeds), digits=4)
    return text if len({mean > 0 for mean, _ in seeds}) == 1 else text.replace("**", "")


def differences_table(record: Record) -> str:
    """Paired differences in bits per byte; below zero the first of the two is better."""
    lines = []
    for mixer, name in MIXERS.items():
        for pair in PAIRS:
            whole, ranges = difference(record, mixer, pair)
            each = ", ".join(number(mean, signed=True, digits=4) for mean, _ in whole)
            cells = [cell(list(seeds)) for seeds in [whole, *zip(*ranges, strict=True)]]
            lines.append([name, pair.replace(" - ", " − "), each, *cells])
    return table(["mixer", "difference", "by seed", "all", *ranges_of(record)], lines)


def tables() -> dict[str, str]:
    """Both tables by the names in their markers."""
    record = read(RECORD)
    return {"bits per byte": bits_table(record), "differences in bits per byte": differences_table(record)}
