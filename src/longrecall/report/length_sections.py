"""Sections of the tasks that show length generalization: copying and stories (babilong)."""

from __future__ import annotations

from collections.abc import Mapping

from longrecall.report import length_plots
from longrecall.report.blocks import Block, Plot, Section, Table
from longrecall.report.inputs import Evaluation, Inputs
from longrecall.report.tables import cell_table, measured_by


def copying(inputs: Inputs) -> Section | None:
    """Copying by length of the string."""
    if not measured_by(inputs.evaluations, "copying", "accuracy"):
        return None
    tables = [
        cell_table(inputs.evaluations, "copying", metric, ("length",))
        for metric in length_plots.COPIED
        if measured_by(inputs.evaluations, "copying", metric)
    ]
    header = ("metric", *tables[0].header)
    rows = tuple(
        (words, *row) for table, words in zip(tables, length_plots.COPIED.values(), strict=False) for row in table.rows
    )
    trained = sorted({letters for entry in inputs.evaluations for letters in _trained_letters(entry, inputs)})
    plot = Plot(
        length_plots.copying_plot(inputs.evaluations, trained, "copying"),
        "Share of random strings, and of their letters, that are copied rightly. Bars are 95% intervals.",
        "How to read it: a line that stays high to the right of the dotted mark copies strings longer than it was "
        "trained on."
        if trained
        else "How to read it: the further right a line stays high, the longer the strings that are copied.",
        Table("copying: accuracy", header, rows, hidden=True),
    )
    return Section("copying", "Copying by length", [plot])


def _trained_letters(evaluation: Evaluation, inputs: Inputs) -> list[int]:
    """Return the longest string of training as the evaluation says it, else as a recipe of the same label does."""
    options = _mapping(_mapping(evaluation.data.get("settings")).get("options"))
    given = _mapping(options.get("copying")).get("trained")
    if isinstance(given, int):
        return [given]
    longest = []
    for run in inputs.trainings:
        sources = _mapping(_mapping(run.data.get("recipe")).get("data")).get("sources")
        for source in sources if isinstance(sources, list) and run.label == evaluation.label else ():
            lengths = _mapping(source).get("lengths")
            if _mapping(source).get("kind") == "copying" and isinstance(lengths, list) and lengths:
                longest.append(int(lengths[-1]))
    return longest


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


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
    blocks: list[Block] = [plot]
    if measured_by(inputs.evaluations, "babilong", "exact_match"):
        blocks.append(cell_table(inputs.evaluations, "babilong", "exact_match", ("task", "length")))
    return Section("babilong", "Stories in a long text", blocks)
