"""Sections of diagnoses: the verdict in words, and a plot for each part that some file holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from longrecall.report import diagnosis_plots as plots
from longrecall.report.blocks import Block, Findings, Plot, Section, Table, with_interval
from longrecall.report.diagnoses import Diagnosis, Point
from longrecall.report.inputs import Inputs
from longrecall.report.summaries import Number

_STATISTICS = {
    "std": (
        "standard deviation",
        "How to read it: a line that keeps rising beyond the mark reaches states that never occurred in training.",
    ),
    "norm": (
        "Frobenius norm",
        "How to read it: a line that levels off is stable; a line that keeps climbing drifts away from what was "
        "trained.",
    ),
    "effective_rank": (
        "effective rank",
        "How to read it: the closer a line comes to 100%, the less room the state has left for new associations.",
    ),
}
"""Statistic -> its name on the axis, and how its plot is read."""


def verdict(inputs: Inputs) -> Section | None:
    """What diagnose says, in its own words."""
    blocks = [
        Findings(entry.label, tuple((finding.name, finding.text, finding.advice) for finding in entry.verdict))
        for entry in inputs.diagnoses
        if entry.verdict
    ]
    return Section("verdict", "What the diagnosis says", blocks) if blocks else None


def perplexity(inputs: Inputs) -> Section | None:
    """Loss by position."""
    chosen = [entry for entry in inputs.diagnoses if entry.losses]
    if not chosen:
        return None
    spans = sorted({(span.start, span.end) for entry in chosen for span in entry.losses})
    found = {(entry.label, span.start, span.end): span for entry in chosen for span in entry.losses}
    rows = []
    for start, end in spans:
        cells = [f"{start:,} to {end:,}"]
        for entry in chosen:
            span = found.get((entry.label, start, end))
            bits = None if span is None else span.bits_per_byte
            cells.append(
                _cell(None if span is None else span.loss) + ("" if bits is None else f"\n{bits:.3f} bits per byte")
            )
        rows.append(tuple(cells))
    plot = Plot(
        plots.perplexity_plot(chosen, inputs.labels, "diagnosis-perplexity"),
        "Loss on running text by position, mean over sequences. Bands are 95% intervals; the dotted line marks the "
        "training length.",
        "How to read it: if a line rises to the right of the mark, the model fails on texts longer than it was "
        "trained on.",
        Table("Loss by position, nats per token", _header("positions", chosen), tuple(rows), hidden=True),
    )
    return Section("perplexity", "Loss far beyond the training length", [plot])


def state(inputs: Inputs) -> Section | None:
    """Statistics of the recurrent state by position, layer by layer."""
    chosen = [entry for entry in inputs.diagnoses if entry.layers and entry.positions]
    if not chosen:
        return None
    layers = sorted({layer.layer for entry in chosen for layer in entry.layers})
    shown = plots.shown_layers(chosen)
    blocks: list[Block] = []
    for statistic, (words, reading) in _STATISTICS.items():
        caption = (
            f"{words[0].upper()}{words[1:]} of the state by position, layer by layer: the line is the median over "
            "heads, the shade reaches from the lowest to the highest head. The dotted line marks the training "
            "length."
        )
        if statistic == "effective_rank":
            caption += " 100% is the largest rank that a head's state can have."
        if len(shown) < len(layers):
            caption += f" {len(shown)} of {len(layers)} layers are drawn; the table has all."
        svg = plots.state_plot(chosen, inputs.labels, statistic, words, f"diagnosis-{statistic.replace('_', '-')}")
        blocks.append(Plot(svg, caption, reading, _state_table(chosen, layers, statistic, words)))
    return Section("state", "The recurrent state over time", blocks)


def _state_table(chosen: Sequence[Diagnosis], layers: Sequence[int], statistic: str, words: str) -> Table:
    """Return each layer at three positions of every file: the first, the last within the training length, the last."""
    rows = []
    for layer in layers:
        for which in ("first", "training length", "last"):
            cells = [f"layer {layer}", which]
            for entry in chosen:
                place = _place(entry, which)
                states = [found for found in entry.layers if found.layer == layer]
                values = plots.head_values(states[0], statistic, place) if states else []
                cells.append(f"{median(values):.4g}\nat {entry.positions[place]:,}" if values else "–")
            rows.append(tuple(cells))
    header = ("layer", "position", *(entry.label for entry in chosen))
    return Table(f"{words[0].upper()}{words[1:]} of the state, median over heads", header, tuple(rows), hidden=True)


def _place(entry: Diagnosis, which: str) -> int:
    if which == "first":
        return 0
    if which == "last":
        return len(entry.positions) - 1
    within = [index for index, position in enumerate(entry.positions) if position <= entry.training_length]
    return within[-1] if within else 0


def remembrance(inputs: Inputs) -> Section | None:
    """Effective remembrance by number of tokens left out."""
    chosen = [entry for entry in inputs.diagnoses if entry.remembrance]
    if not chosen:
        return None
    plot = Plot(
        plots.remembrance_plot(chosen, inputs.labels, "diagnosis-remembrance"),
        "How much the prediction at the end changes when the first t tokens are left out (0 = not at all, "
        "1 = entirely). Bands are 95% intervals.",
        "How to read it: a healthy line lies low and rises only at the right. A line that jumps up at the left "
        "depends on the first tokens of the text.",
        _point_table("EffRem by tokens left out", "t", chosen, lambda entry: entry.remembrance),
    )
    return Section("remembrance", "Effective remembrance", [plot])


def recall(inputs: Inputs) -> Section | None:
    """Recall by length, and the longest length for each threshold."""
    chosen = [entry for entry in inputs.diagnoses if entry.recall]
    if not chosen:
        return None
    plot = Plot(
        plots.recall_plot(chosen, inputs.labels, "diagnosis-recall"),
        "Share of pass keys that are found again, by length of the text. Bands are 95% intervals; the dotted line "
        "marks the training length.",
        "How to read it: the length at which a line falls through a threshold is as far as the model can look back.",
        _point_table("Pass keys recalled by length", "length", chosen, lambda entry: entry.recall),
    )
    blocks: list[Block] = [plot]
    thresholds = sorted({key for entry in chosen for key in entry.maximum}, key=_threshold)
    if thresholds:
        rows = tuple(
            (f"{_threshold(key):.0%}" if math.isfinite(_threshold(key)) else key, *(_longest(e, key) for e in chosen))
            for key in thresholds
        )
        blocks.append(Table("Longest text in tokens whose recall stays above", _header("threshold", chosen), rows))
    return Section("recall", "How far recall reaches", blocks)


def _threshold(key: str) -> float:
    try:
        return float(key)
    except ValueError:
        return math.inf


def _longest(entry: Diagnosis, key: str) -> str:
    def words(length: int | None) -> str:
        return "none" if length is None else f"{length:,}"

    low, high = entry.maximum_intervals.get(key, (None, None))
    interval = "" if low == high else f"\n{words(low)} to {words(high)}"
    return words(entry.maximum.get(key)) + interval


def _point_table(
    caption: str, first: str, chosen: Sequence[Diagnosis], points: Callable[[Diagnosis], Sequence[Point]]
) -> Table:
    found = {(entry.label, point.place): point for entry in chosen for point in points(entry)}
    places = sorted({place for _, place in found})
    rows = tuple((f"{place:,.0f}", *(_cell(found.get((entry.label, place))) for entry in chosen)) for place in places)
    return Table(caption, _header(first, chosen), rows, hidden=True)


def _cell(point: Point | None) -> str:
    if point is None:
        return "–"
    return f"{with_interval(Number(point.value, point.low, point.high))}\nn = {point.count:,}"


def _header(first: str, chosen: Sequence[Diagnosis]) -> tuple[str, ...]:
    return (first, *(entry.label for entry in chosen))
