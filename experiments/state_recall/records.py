"""What docs/state_recall.md and its folder have: recall lengths by state size, lines, forms of expansion."""

from __future__ import annotations

import math
import statistics
from typing import Any

from experiments.common import pages
from experiments.common.intervals import Line, bootstrap, line, rank_correlation, t_quantile, t_quantile_of_all
from experiments.state_recall.arms import EQUAL, parts_of

TREND, ABLATION = "state_recall_trend*.json", "state_recall_ablation*.json"
"""Files of each study; its seeds may be runs of their own."""
ABLATION_8 = "state_recall_e8_ablation*.json"
"""The ablation at the factor of the paper's table 7, where it was run."""
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
PAPER = {
    "headwise": 37.39,
    "low_rank": 36.71,
    "dpfp": 33.93,
    "lfm": 34.52,
    "whole": 29.84,
    "relu": 36.48,
    "1+elu": 26.86,
    "identity": 36.29,
}
"""Recall in the paper's table 7: mean of FDA, SWDE and SQuAD, in percent, E = 8."""
WHOLE, SINGLE = "recall_length", "character_recall_length"
"""Fields of a row: lengths by the share of values recalled whole, and by that of their characters."""
Row = dict[str, Any]
Record = dict[str, Any]


def joined(pattern: str) -> Record:
    """The runs of one study as one record; ``runs`` has each by itself."""
    runs = [pages.read(path.name) for path in sorted(pages.RESULTS.glob(pattern))]
    if not runs:
        raise FileNotFoundError(f"no {pattern} in {pages.RESULTS}")
    return {**runs[0], "results": [row for run in runs for row in run["results"]], "runs": runs}


def recorded(pattern: str) -> bool:
    """Whether there are files of a study."""
    return any(pages.RESULTS.glob(pattern))


def models(record: Record, mixer: str) -> list[Row]:
    """The rows of a mixer by state size, then seed; a name is ``mixer:factor`` or ``mixer``.

    ``mixer=`` are those with the parameters of the largest factor.
    """
    rows = [row for row in record["results"] if row["model"].split(":")[0] == mixer]
    if rows and mixer.endswith(EQUAL):
        # The largest factor is trained once, for both arms.
        plain = [row for row in record["results"] if row["model"].split(":")[0] == mixer.removesuffix(EQUAL)]
        rows += [row for row in plain if factor(row) == max(map(factor, plain))]
    return sorted(rows, key=lambda row: (row["state_size"], row["seed"]))


def factor(row: Row) -> int:
    """Of the expansion; 1 = none."""
    return parts_of(row["model"])[1]


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


PLATEAU = 0.5
"""Recall over the shortest texts of a run that has left the plateau of guessing."""


def left_plateau(row: Row, haystack: str = "needles:number") -> bool:
    """Whether a run has learned the task at all."""
    point = min(row["points"][haystack], key=lambda point: int(point["length"]))
    return bool(point["right"] / point["asked"] >= PLATEAU)


def exponent_over_seeds(
    record: Record, mixer: str, haystack: str, threshold: float, measure: str = WHOLE
) -> tuple[float | None, tuple[float, float] | None, int]:
    """Exponent of recall length by state size, its 95% bootstrap over seeds, and its runs: those off the plateau.

    A run that recalls nothing has no logarithm and is left out, as is one that recalls the longest text.
    """
    groups = [list(filter(left_plateau, rows)) for rows in by_factor(record, mixer).values()]

    def slope(drawn: list[list[Row]]) -> float | None:
        known = [(row["state_size"], reached(row, haystack, threshold, measure), row) for rows in drawn for row in rows]
        some = [(math.log2(a), math.log2(b)) for a, b, row in known if 0 < b < longest(row, haystack)]
        fitted = line([a for a, _ in some], [b for _, b in some])
        return None if fitted is None else fitted.slope

    return slope(groups), bootstrap(groups, slope), sum(map(len, groups))


def share(row: Row, haystack: str) -> float:
    """Share of values recalled whole, the mean over all lengths."""
    return statistics.mean(point["right"] / point["asked"] for point in row["points"][haystack])


def recall_at(row: Row, haystack: str, length: int) -> float:
    """Share of values recalled whole at one length; not a number where it was not tried."""
    points = (point for point in row["points"][haystack] if point["length"] == length)
    return next((point["right"] / point["asked"] for point in points), math.nan)


def forms(record: Record) -> dict[str, list[Row]]:
    """Form -> its rows by seed, in the order of `FORMS`; those that were run."""
    found = {form: [row for row in record["results"] if row["model"] == form] for form in FORMS}
    return {form: sorted(rows, key=lambda row: int(row["seed"])) for form, rows in found.items() if rows}


def mean_recall(rows: list[Row]) -> float:
    """Of whole numbers among needles: the mean over lengths and seeds."""
    return statistics.mean(share(row, "needles:number") for row in rows)


def difference(record: Record, form: str) -> float:
    """Mean recall of a form less that of head-wise expansion."""
    return mean_recall(forms(record)[form]) - mean_recall(forms(record)["headwise"])


def difference_half(record: Record, many: int = 1) -> float | None:
    """Half of the 95% t interval of a difference of two forms, from the spread of seeds in all; None for one seed.

    `many`: differences of which all are to lie in their intervals (Bonferroni).
    """
    spreads = [[share(row, "needles:number") for row in rows] for rows in forms(record).values()]
    degrees = sum(len(values) - 1 for values in spreads)
    if not degrees:
        return None
    variance = sum(statistics.variance(values) * (len(values) - 1) for values in spreads if len(values) > 1) / degrees
    seeds = min(len(values) for values in spreads)
    quantile = t_quantile(degrees) if many == 1 else t_quantile_of_all(degrees, many)
    return quantile * math.sqrt(2 * variance / seeds)


def together_half(record: Record) -> float | None:
    """The same of the differences of all forms from head-wise expansion together: ten would tell one by chance."""
    return difference_half(record, max(1, len(forms(record)) - 1))


def seed_spread(record: Record) -> float:
    """Largest difference of mean recall of numbers between two seeds of one model of the trend."""
    groups = [rows for mixer in MIXERS for rows in by_factor(record, mixer).values()]
    values = [[share(row, "needles:number") for row in rows] for rows in groups]
    return max(max(of) - min(of) for of in values)


def apart(record: Record, trend: Record) -> dict[str, float]:
    """Form -> difference from head-wise expansion, where more than `together_half`; of one seed, than `seed_spread`."""
    limit = together_half(record) or seed_spread(trend)
    found = {form: difference(record, form) for form in forms(record) if form != "headwise"}
    return {form: value for form, value in found.items() if abs(value) > limit}


def against_paper(record: Record) -> float:
    """Rank correlation of mean recall with the paper's over its eight forms."""
    found = {form: rows for form, rows in forms(record).items() if form in PAPER}
    return rank_correlation([mean_recall(rows) for rows in found.values()], [PAPER[form] for form in found])
