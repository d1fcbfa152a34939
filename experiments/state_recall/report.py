"""Turn the recorded models of experiment.py into tables and figure of docs/state_recall.md and its folder.

Usage: python -m experiments.state_recall.report            rewrites what stands between the markers, and the figure
       python -m experiments.state_recall.report --check    changes nothing; exit code 1 when a table is out of date

A recall length is that of one model. The lines are least squares through all models of a mixer, every factor and seed,
without those that recall even the longest text (their recall length is not known) and, in logarithms, those that recall
none. Their intervals are Student's t over the residuals.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import pages
from experiments.common.intervals import bootstrap
from experiments.common.pages import number, table
from experiments.state_recall.arms import EQUAL, parts_of
from experiments.state_recall.records import (
    ABLATION,
    ABLATION_8,
    FORMS,
    KINDS,
    MIXERS,
    PAPER,
    SINGLE,
    TREND,
    WHOLE,
    Record,
    Row,
    against_paper,
    apart,
    by_factor,
    difference,
    difference_half,
    exponent_over_seeds,
    fitted,
    forms,
    joined,
    left_plateau,
    longest,
    reached,
    recall_at,
    recorded,
    seed_spread,
    share,
    together_half,
)

PAGE = "state_recall.md"
NUMBER_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
PROSE_LENGTHS = (512, 1024, 1536, 2048)


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


def arms(record: Record) -> dict[str, str]:
    """Mixers with a state, and those of equal parameters where there are any, by what they are called."""
    names = {mixer: MIXERS[mixer] for mixer in ("gated_delta_net", "gla")}
    equal = {f"{mixer}{EQUAL}": f"{name}, equal parameters" for mixer, name in names.items()}
    return {mixer: name for mixer, name in (names | equal).items() if by_factor(record, mixer)}


def seeds_table(record: Record) -> str:
    """Runs that left the plateau of guessing, and their mean recall of numbers with its bootstrap over the seeds."""
    lines = []
    for mixer, name in arms(record).items():
        for many, rows in by_factor(record, mixer).items():
            off = [share(row, "needles:number") for row in rows if left_plateau(row)]
            interval = bootstrap([off], lambda drawn: statistics.mean(drawn[0]) if drawn else None)
            mean = between(statistics.mean(off) if off else None, interval)
            lines.append([name, str(many), f"{rows[0]['parameters']:,}", f"{len(off)} of {len(rows)}", mean])
    heads = ["model", "E", "parameters", "left the plateau", "numbers, mean recall of these"]
    return table(heads, lines, texts=1)


def exponents_table(record: Record) -> str:
    """Exponents of recall length by state size at the lowest threshold, with bootstraps over the seeds."""
    lines, threshold = [], record["thresholds"][0]
    for (mixer, name), (kind, values) in itertools.product(arms(record).items(), KINDS.items()):
        found = [
            exponent_over_seeds(record, mixer, f"needles:{kind}", threshold, measure) for measure in (WHOLE, SINGLE)
        ]
        cells = [between(slope, interval) for slope, interval, _ in found]
        lines.append([name, values, str(found[0][2]), *cells])
    return table(["model", "values", "runs off the plateau", "exponent, whole values", "characters"], lines)


def between(value: float | None, interval: tuple[float, float] | None) -> str:
    """A number with its interval, as far as they are known."""
    if value is None:
        return ""
    ends = "" if interval is None else f" ({number(interval[0], digits=2)} to {number(interval[1], digits=2)})"
    return number(value, digits=2) + ends


def with_half(value: float, half: float | None, digits: int, signed: bool = False) -> str:
    """A number and the half width of its interval, if that is known."""
    return number(value, signed, digits) + ("" if half is None else f" ± {number(half, digits=digits)}")


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


def curves_table(record: Record, haystack: str, lengths: Sequence[int]) -> str:
    """Share of values recalled whole at some lengths, means over the seeds."""
    lines = []
    for mixer, name in MIXERS.items():
        for many, rows in by_factor(record, mixer).items():
            cells = [
                number(statistics.mean(recall_at(row, haystack, length) for row in rows), digits=2)
                for length in lengths
            ]
            lines.append([name, str(many) if rows[0]["state_size"] else "", *cells])
    return table(["model", "E", *(f"{length:,}" for length in lengths)], lines)


def ablation_table(record: Record) -> str:
    """Every form of expansion: parameters, recall, its difference from head-wise expansion, and bits per byte."""
    lines, found = [], forms(record)
    half = difference_half(record)
    for form, rows in found.items():
        sizes = [f"{rows[0]['state_size']:,}", f"{rows[0]['parameters']:,}"]
        lengths = shown(rows, "needles:number", record["thresholds"][0])
        recall = [lengths, *(seeds(rows, f"needles:{kind}") for kind in KINDS)]
        apart = (
            "" if form == "headwise" or "headwise" not in found else with_half(difference(record, form), half, 3, True)
        )
        paper = f"{PAPER[form]:.2f}" if form in PAPER else ""
        lines.append([FORMS[form], *sizes, *recall, apart, bits(rows), paper])
    first = number(record["thresholds"][0], digits=1)
    heads = [f"numbers > {first}", "numbers, mean", "UUIDs, mean", "numbers, against head-wise"]
    return table(["form", "state", "parameters", *heads, "bits per byte", "paper's recall"], lines, texts=1)


def ablation_words(record: Record, trend: Record) -> str:
    """Which forms are told from head-wise expansion, and whether the order is the paper's."""
    half, found = together_half(record), apart(record, trend)
    limit = (
        f"± {number(half)}, the 95% interval of all differences together"
        if half
        else f"two seeds of one model of the trend ({number(seed_spread(trend))})"
    )
    names = {sign: [FORMS[form] for form, value in found.items() if value * sign > 0] for sign in (1, -1)}
    lines = [
        f"- {word} head-wise expansion by more than {limit}: {', '.join(names[sign]) or 'none'}."
        for word, sign in (("Above", 1), ("Below", -1))
    ]
    lines.append(
        f"- Rank correlation of mean recall with the paper's, eight forms: {number(against_paper(record), digits=2)}."
    )
    return "\n".join(lines) + "\n"


def loss_then(row: Row, first: float, last: float) -> float:
    """Mean of the recorded losses between two shares of the steps."""
    end = row["losses"][-1][0]
    return statistics.mean(loss for step, loss in row["losses"] if first * end <= step <= last * end)


def settings_table(record: Record, ablation: Record) -> str:
    """What the runs took."""
    lines = []
    for name, run in [*(("trend", run) for run in record["runs"]), *(("ablation", run) for run in ablation["runs"])]:
        training, rows = run["training"], run["results"]
        tried = ", ".join(map(str, sorted({row["seed"] for row in rows})))
        sizes = [tried, str(len(rows)), f"{training['steps']:,}", f"{rows[0]['bytes'] / 1e6:.1f}M"]
        lines.append([name, *sizes, f"{training['seconds']:.0f} s", peak_rates(rows), *described(run["settings"])])
    heads = ["run", "seeds", "models", "steps", "bytes each", "training", "peak learning rate"]
    heads += ["rows of a step", "heads", "few, short values", "all sizes from", "shorter rows", "longest text"]
    return table(heads, lines, texts=1)


def described(settings: dict[str, Any]) -> list[str]:
    """Rows, heads, what begins small and the longest text that was tried, of one run."""
    cuts = [f"{settings['length'] // pieces} to {until:.0%}" for until, pieces in settings.get("cuts", ())]
    sizes = [f"{sum(settings['rows'])} × {settings['length']:,}", f"{settings['heads']} × {settings['head_dim']}"]
    begin = [f"to {settings['early']:.0%}", f"{settings['ramp']:.0%}", ", ".join(cuts) or "none"]
    return [*sizes, *begin, f"{settings['longest']:,}"]


def peak_rates(rows: list[Row]) -> str:
    """The peak learning rate of the first model, then of every mixer that has another."""
    first, others = rows[0]["learning_rate"], dict[str, float]()
    for row in rows:
        if row["learning_rate"] != first:
            others[MIXERS[parts_of(row["model"])[0]]] = row["learning_rate"]
    return ", ".join([f"{first:g}", *(f"{name} {rate:g}" for name, rate in others.items())])


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker."""
    record, ablation = joined(TREND), joined(ABLATION)
    at_8 = {}
    if recorded(ABLATION_8):
        later = joined(ABLATION_8)
        at_8 = {"ablation at 8": ablation_table(later), "ablation at 8 in words": ablation_words(later, record)}
    return {
        **at_8,
        "runs": settings_table(record, ablation),
        "in short": short_table(record),
        "recall of numbers": lengths_table(record, "number"),
        "recall of UUIDs": lengths_table(record, "uuid"),
        "lines": fits_table(record),
        "characters of numbers": lengths_table(record, "number", SINGLE),
        "characters of UUIDs": lengths_table(record, "uuid", SINGLE),
        "lines of characters": fits_table(record, SINGLE),
        "mean recall": shares_table(record),
        "over seeds": seeds_table(record),
        "exponents over seeds": exponents_table(record),
        "numbers by length": curves_table(record, "needles:number", NUMBER_LENGTHS),
        "prose by length": curves_table(record, "prose:uuid", PROSE_LENGTHS),
        "ablation": ablation_table(ablation),
        "ablation in words": ablation_words(ablation, record),
    }


def draw(folder: Path) -> None:
    """The figure of the page."""
    from experiments.state_recall.figures import recall_figure

    recall_figure(joined(TREND), folder / "state_recall.svg")


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables, draw)
