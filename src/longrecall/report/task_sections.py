"""The sections of single tasks: the line charts that tasks declare, and those that need a plot of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from longrecall.report import length_plots, plots
from longrecall.report.blocks import Block, Plot, Section, Table, with_interval
from longrecall.report.inputs import Evaluation, Inputs
from longrecall.report.summaries import Number
from longrecall.report.tables import cell_table, explained, measured_by
from longrecall.tasks.declaration import LineChart
from longrecall.tasks.registry import report_parts

_PASSKEY_MAP = "Pass key: share of keys recalled by length of the text and depth of the needle"


def makers(shares: bool) -> list[Callable[[Inputs], Section | None]]:
    """Return what makes the sections of the tasks that measure shares of right answers, or of the others."""
    found: list[Callable[[Inputs], Section | None]] = []
    for task, part in report_parts(shares).items():
        if part.chart is not None:
            found.append(partial(line_chart, task=task, chart=part.chart))
        elif task in _OWN:
            found.append(_OWN[task])
    return found


def line_chart(inputs: Inputs, task: str, chart: LineChart) -> Section | None:
    """The chart that `task` declares, with its numbers in a table."""
    metrics = [metric for metric in chart.metrics if measured_by(inputs.evaluations, task, metric)]
    if not metrics:
        return None
    tables = [cell_table(inputs.evaluations, task, metric, (chart.along,)) for metric in metrics]
    header = ("metric", *tables[0].header)
    rows = tuple(
        (chart.metrics[metric], *row) for metric, table in zip(metrics, tables, strict=True) for row in table.rows
    )
    trained = sorted({place for entry in inputs.evaluations for place in _trained_to(entry, inputs, task, chart)})
    plot = Plot(
        length_plots.line_chart(inputs.evaluations, task, chart, trained),
        chart.caption,
        chart.trained.reading if trained and chart.trained is not None else chart.reading,
        Table(f"{task}: accuracy", header, rows, hidden=True),
    )
    return Section(task, chart.heading, [*explained(task), plot])


def _trained_to(evaluation: Evaluation, inputs: Inputs, task: str, chart: LineChart) -> list[int]:
    """Return how far training went as the evaluation says it, else as a recipe of the same label does."""
    if chart.trained is None:
        return []
    options = _mapping(_mapping(evaluation.data.get("settings")).get("options"))
    given = _mapping(options.get(task)).get(chart.trained.option)
    if isinstance(given, int):
        return [given]
    longest = []
    for run in inputs.trainings:
        sources = _mapping(_mapping(run.data.get("recipe")).get("data")).get("sources")
        for source in sources if isinstance(sources, list) and run.label == evaluation.label else ():
            lengths = _mapping(source).get(chart.trained.source_key)
            if _mapping(source).get("kind") == task and isinstance(lengths, list) and lengths:
                longest.append(int(lengths[-1]))
    return longest


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def phonebook(inputs: Inputs) -> Section | None:
    """Recall by number of pairs."""
    chosen = measured_by(inputs.evaluations, "phonebook", "accuracy")
    if not chosen:
        return None
    data = cell_table(inputs.evaluations, "phonebook", "accuracy", ("pairs", "distance"))
    caption = (
        "Share of phone-book queries whose whole number is predicted, by how many pairs the book holds. "
        "Bars are 95% intervals."
    )
    reading = "How to read it: the further right a line stays near the top, the more associations the state holds."
    plot = Plot(plots.phonebook_plot(inputs.evaluations, "phonebook"), caption, reading, data)
    blocks: list[Block] = [*explained("phonebook"), plot]
    return Section("phonebook", "Phone book by number of pairs", blocks)


def passkey(inputs: Inputs) -> Section | None:
    """Recall by length and depth."""
    if not measured_by(inputs.evaluations, "passkey", "accuracy"):
        return None
    cells = cell_table(inputs.evaluations, "passkey", "accuracy", ("length", "depth"))
    by_length = {entry.label: plots.mean_by_length(entry) for entry in inputs.evaluations}
    lengths = sorted({length for numbers in by_length.values() for length in numbers})
    rows = tuple(
        (f"{length:,.0f}", *(with_interval(by_length[e.label].get(length, Number(None))) for e in inputs.evaluations))
        for length in lengths
    )
    means = Table(
        "Pass key by length, mean over depths", ("length", *(e.label for e in inputs.evaluations)), rows, hidden=True
    )
    return Section(
        "passkey",
        "Pass key by length and depth",
        [
            *explained("passkey"),
            Plot(
                plots.passkey_by_length(inputs.evaluations, "passkey-length"),
                "Share of pass keys recalled by length of the text, mean over depths. Bars are 95% intervals.",
                "How to read it: where a line falls, the text has grown too long for the key to be found again.",
                means,
            ),
            Plot(
                plots.depth_maps(inputs.evaluations, "passkey", "accuracy", "passkey-map", _PASSKEY_MAP),
                "The same by depth, in percent: 0% is the beginning of the text, the farthest from the question.",
                "How to read it: dark cells are recalled; a map that pales towards its top right forgets early text.",
                cells,
            ),
        ],
    )


def babilong(inputs: Inputs) -> Section | None:
    """Questions about stories, by type and length."""
    if not measured_by(inputs.evaluations, "babilong", "accuracy"):
        return None
    trained = {}
    for entry in inputs.evaluations:
        context = entry.data["checkpoint"].get("context_length")
        if isinstance(context, int):
            trained[entry.label] = context
    plot = Plot(
        length_plots.babilong_heat_maps(inputs.evaluations, trained, "babilong-map"),
        "Share of questions, in percent, answered rightly about stories that are scattered through a book: one fact "
        "needed (qa1), two (qa2), three (qa3), places beside each other (qa4), who gave what to whom (qa5).",
        "How to read it: dark cells are answered; a map that stays dark to the right, beyond the dashed line where the "
        "training length lies within it, reasons over longer texts.",
        cell_table(inputs.evaluations, "babilong", "accuracy", ("task", "length")),
    )
    blocks: list[Block] = [*explained("babilong"), plot]
    if measured_by(inputs.evaluations, "babilong", "exact_match"):
        blocks.append(cell_table(inputs.evaluations, "babilong", "exact_match", ("task", "length")))
    return Section("babilong", "Stories in a long text", blocks)


def positions(inputs: Inputs) -> Section | None:
    """Bits per byte by position."""
    if not measured_by(inputs.evaluations, "bits_per_byte", "bits_per_byte"):
        return None
    data = cell_table(inputs.evaluations, "bits_per_byte", "bits_per_byte", ("start", "end"))
    caption = "How well running text is predicted, by position in it. Bars are 95% intervals."
    reading = (
        "How to read it: lower is better, and a curve that rises to the right shows a model that fails beyond the "
        "length it was trained on."
    )
    plot = Plot(plots.position_plot(inputs.evaluations, "positions"), caption, reading, data)
    return Section("positions", "Bits per byte by position", [*explained("bits_per_byte"), plot])


_OWN: dict[str, Callable[[Inputs], Section | None]] = {
    "phonebook": phonebook,
    "passkey": passkey,
    "babilong": babilong,
    "bits_per_byte": positions,
}
