"""Turn the recorded models of state_recall.py into the tables and the figure of docs/state_recall.md.

Usage: python experiments/report_state_recall.py            rewrites what stands between the markers, and the figure
       python experiments/report_state_recall.py --check    changes nothing; exit code 1 when a table is out of date

A recall length is that of one model. The lines are least squares through all models of a mixer, every factor and seed,
without those that recall even the longest text (their recall length is not known) and, in logarithms, those that recall
none. Their intervals are Student's t over the residuals.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
from pages import number, read, table

TREND, ABLATION = "state_recall_trend*.json", "state_recall_ablation*.json"
"""Files of each study; its seeds may be runs of their own."""
MIXERS = {"gated_delta_net": "Gated DeltaNet", "gla": "GLA", "transformer": "Transformer"}
KINDS = {"number": "numbers", "uuid": "UUIDs"}
FORMS = {
    "headwise": "head-wise, subheads, SiLU",
    "low_rank": "low rank",
    "dpfp": "DPFP",
    "lfm": "LFM",
    "whole": "without subheads",
    "relu": "ReLU",
    "1+elu": "1 + ELU",
    "identity": "no activation",
    "naive": "wider projections",
    "heads": "more heads",
    "none": "no expansion",
}
"""Ablations in the order of the paper's tables 7 and 8."""
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604)
"""97.5% quantiles of Student's t with 1, 2, ... degrees of freedom."""
WHOLE, SINGLE = "recall_length", "character_recall_length"
"""Fields of a row: lengths by the share of values recalled whole, and by that of their characters."""
Row = dict[str, Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x through `points` points; `half` of the slope's 95% interval, None below 3 points."""

    points: int
    slope: float
    intercept: float
    half: float | None
    explained: float
    """Share of the variance of y (R squared)."""


def line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Least squares; None where it takes more different x than there are."""
    if len(set(x)) < 2:
        return None
    count, mean_x, mean_y = len(x), statistics.mean(x), statistics.mean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - mean_y) ** 2 for b in y)
    half = None
    if count > 2:
        half = T_QUANTILES[count - 3] * math.sqrt(left / (count - 2) / spread)
    return Line(count, slope, intercept, half, 1 - left / total if total else 0.0)


def joined(pattern: str) -> Record:
    """The runs of one study as one record; ``runs`` has each by itself."""
    runs = [read(path.name) for path in sorted(pages.RESULTS.glob(pattern))]
    if not runs:
        raise FileNotFoundError(f"no {pattern} in {pages.RESULTS}")
    return {**runs[0], "results": [row for run in runs for row in run["results"]], "runs": runs}


def models(record: Record, mixer: str) -> list[Row]:
    """The rows of a mixer by state size, then seed; a name is ``mixer:factor`` or ``mixer``."""
    rows = [row for row in record["results"] if row["model"].split(":")[0] == mixer]
    return sorted(rows, key=lambda row: (row["state_size"], row["seed"]))


def factor(row: Row) -> int:
    """Of the expansion; 1 = none."""
    return int(row["model"].partition(":")[2] or 1)


def by_factor(record: Record, mixer: str) -> dict[int, list[Row]]:
    """Factor -> its rows, one for each seed."""
    found: dict[int, list[Row]] = {}
    for row in models(record, mixer):
        found.setdefault(factor(row), []).append(row)
    return found


def longest(row: Row, haystack: str) -> int:
    """The longest text that was tried."""
    return max(point["length"] for point in row["points"][haystack])


def reached(row: Row, haystack: str, threshold: float, measure: str = WHOLE) -> int:
    """Maximum recall length of one model."""
    return int(row[measure][haystack][str(threshold)])


def shown(rows: list[Row], haystack: str, threshold: float, measure: str = WHOLE) -> str:
    """The recall lengths of all seeds; `≥` where even the longest text was recalled."""
    values = [reached(row, haystack, threshold, measure) for row in rows]
    return ", ".join(f"{'≥ ' if v == longest(row, haystack) else ''}{v}" for v, row in zip(values, rows, strict=True))


def lengths_table(record: Record, kind: str, measure: str = WHOLE) -> str:
    """Maximum recall lengths of every model."""
    lines = []
    for mixer, name in MIXERS.items():
        for many, rows in by_factor(record, mixer).items():
            size = rows[0]["state_size"]
            sizes = [f"{size:,}" if size else "grows", f"{rows[0]['parameters']:,}"]
            cells = [shown(rows, f"needles:{kind}", t, measure) for t in record["thresholds"]]
            lines.append([name, str(many) if size else "", *sizes, *cells])
    heads = [f"> {number(t, digits=1)}" for t in record["thresholds"]]
    return table(["model", "E", "state", "parameters", *heads], lines)


def fitted(
    record: Record, mixer: str, kind: str, threshold: float, measure: str = WHOLE
) -> tuple[Line | None, Line | None, int]:
    """The line through recall lengths and state sizes, that through their logarithms, and the models left out."""
    rows, haystack = models(record, mixer), f"needles:{kind}"
    lengths = [(row["state_size"], reached(row, haystack, threshold, measure), longest(row, haystack)) for row in rows]
    known = [(size, length) for size, length, most in lengths if length < most]
    x, y = [size for size, _ in known], [length for _, length in known]
    some = [(math.log2(a), math.log2(b)) for a, b in zip(x, y, strict=True) if b]
    return line(x, y), line([a for a, _ in some], [b for _, b in some]), len(rows) - len(known)


def fits_table(record: Record, measure: str = WHOLE) -> str:
    """The lines of both mixers and kinds at every threshold; slopes in bytes per 1,000 numbers of state."""
    lines = []
    for mixer in ("gated_delta_net", "gla"):
        for kind, name in KINDS.items():
            for threshold in record["thresholds"]:
                straight, power, out = fitted(record, mixer, kind, threshold, measure)
                cells = [MIXERS[mixer], name, f"> {number(threshold, digits=1)}"]
                if straight is None:
                    lines.append([*cells, "", "", "", "", "", str(out)])
                    continue
                slope = with_half(1000 * straight.slope, None if straight.half is None else 1000 * straight.half, 1)
                exponent = "" if power is None else with_half(power.slope, power.half, 2)
                used = "" if power is None else str(power.points)
                explained = number(straight.explained, digits=2)
                lines.append([*cells, slope, explained, str(straight.points), exponent, used, str(out)])
    heads = ["model", "values", "recall", "bytes per 1,000 numbers", "R²", "models"]
    heads += ["exponent", "its models", "beyond the longest"]
    return table(heads, lines, texts=3)


def short_table(record: Record) -> str:
    """Recall lengths at the lowest threshold by factor, means over seeds, and the exponent of the line through them."""
    lines, threshold = [], record["thresholds"][0]
    for measure, of in ((WHOLE, "whole values"), (SINGLE, "characters")):
        for mixer, (kind, name) in itertools.product(("gated_delta_net", "gla"), KINDS.items()):
            cells = [
                mean_length(rows, f"needles:{kind}", threshold, measure) for rows in by_factor(record, mixer).values()
            ]
            power = fitted(record, mixer, kind, threshold, measure)[1]
            exponent = "" if power is None else with_half(power.slope, power.half, 2)
            lines.append([of, MIXERS[mixer], name, *cells, exponent])
    heads = [f"E = {many}" for many in by_factor(record, "gla")]
    return table(["recall of", "model", "values", *heads, "exponent"], lines, texts=3)


def mean_length(rows: list[Row], haystack: str, threshold: float, measure: str) -> str:
    """Mean over seeds; `≥` where one of them recalls even the longest text."""
    values = [reached(row, haystack, threshold, measure) for row in rows]
    beyond = any(value == longest(row, haystack) for value, row in zip(values, rows, strict=True))
    return f"{'≥ ' if beyond else ''}{statistics.mean(values):.0f}"


def with_half(value: float, half: float | None, digits: int) -> str:
    """A number and the half width of its interval, if that is known."""
    return number(value, digits=digits) + ("" if half is None else f" ± {number(half, digits=digits)}")


def share(row: Row, haystack: str) -> float:
    """Share of values recalled whole, the mean over all lengths."""
    return statistics.mean(point["right"] / point["asked"] for point in row["points"][haystack])


def shares_table(record: Record) -> str:
    """Mean recall over all lengths in both haystacks, and bits per byte of unseen books."""
    lines = []
    for mixer, name in MIXERS.items():
        for many, rows in by_factor(record, mixer).items():
            cells = [seeds(rows, f"{haystack}:{kind}") for haystack in ("needles", "prose") for kind in KINDS]
            lines.append([name, str(many) if rows[0]["state_size"] else "", *cells, bits(rows)])
    heads = ["needles: numbers", "needles: UUIDs", "prose: numbers", "prose: UUIDs", "bits per byte"]
    return table(["model", "E", *heads], lines)


def seeds(rows: list[Row], haystack: str) -> str:
    """Mean recall of every seed."""
    return ", ".join(number(share(row, haystack), digits=2) for row in rows)


def bits(rows: list[Row]) -> str:
    """Bits per byte of every seed."""
    return ", ".join(number(row["bits_per_byte"][0]) for row in rows)


def ablation_table(record: Record) -> str:
    """Every form of expansion: parameters, recall and bits per byte."""
    lines = []
    for form, name in FORMS.items():
        rows = sorted((row for row in record["results"] if row["model"] == form), key=lambda row: row["seed"])
        if not rows:
            continue
        sizes = [f"{rows[0]['state_size']:,}", f"{rows[0]['parameters']:,}"]
        lengths = [shown(rows, f"needles:{kind}", record["thresholds"][0]) for kind in KINDS]
        lines.append([name, *sizes, *lengths, *(seeds(rows, f"needles:{kind}") for kind in KINDS), bits(rows)])
    first = number(record["thresholds"][0], digits=1)
    heads = [f"numbers > {first}", f"UUIDs > {first}", "numbers, mean", "UUIDs, mean", "bits per byte"]
    return table(["form", "state", "parameters", *heads], lines, texts=1)


def settings_table(record: Record, ablation: Record) -> str:
    """What the runs took."""
    lines = []
    for name, run in [*(("trend", run) for run in record["runs"]), *(("ablation", run) for run in ablation["runs"])]:
        training, rows = run["training"], run["results"]
        tried = ", ".join(map(str, sorted({row["seed"] for row in rows})))
        sizes = [tried, str(len(rows)), f"{training['steps']:,}", f"{rows[0]['bytes'] / 1e6:.1f}M"]
        lines.append([name, *sizes, f"{training['seconds']:.0f} s", f"{rows[0]['learning_rate']:g}"])
    return table(["run", "seed", "models", "steps", "bytes each", "training", "peak learning rate"], lines, texts=1)


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker."""
    record, ablation = joined(TREND), joined(ABLATION)
    return {
        "runs": settings_table(record, ablation),
        "in short": short_table(record),
        "recall of numbers": lengths_table(record, "number"),
        "recall of UUIDs": lengths_table(record, "uuid"),
        "lines": fits_table(record),
        "characters of numbers": lengths_table(record, "number", SINGLE),
        "characters of UUIDs": lengths_table(record, "uuid", SINGLE),
        "lines of characters": fits_table(record, SINGLE),
        "mean recall": shares_table(record),
        "ablation": ablation_table(ablation),
    }


def draw(folder: Path) -> None:
    """The figure of the page."""
    from state_recall_figure import recall_figure

    recall_figure(joined(TREND), folder / "state_recall.svg")


if __name__ == "__main__":
    pages.write_page(__doc__, "state_recall.md", tables, draw)
