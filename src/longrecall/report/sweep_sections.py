"""Sections of sweeps: maps for MQAR, the table of the MAD suite, every cell of the rest, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longrecall.report.blocks import Block, Note, Plot, Section, Table, Words
from longrecall.report.inputs import Inputs
from longrecall.report.sweep_plots import mqar_maps
from longrecall.report.sweeps import (
    Sweep,
    model_names,
    published_mad,
    published_mqar,
    retrieval_layers,
    setting_names,
)
from longrecall.sweep.summary import best_rows
from longrecall.tasks.published import RESONA_TABLE_1_COLUMNS
from longrecall.tasks.registry import wording_of

_MQAR = "mqar"
_MAD_WORDS = ("compression", "in-context recall", "noisy recall", "fuzzy recall", "selective copying", "memorization")
_DASH = "–"


@dataclass(frozen=True)
class _Best:
    """The best pair of learning rate and weight decay of one model on one cell; `value` None where no run ended."""

    file: str
    task: str
    settings: Mapping[str, Any]
    model: Mapping[str, Any]
    metric: str
    value: float | None
    rate: str
    name: str


def _best(sweeps: Sequence[Sweep]) -> list[_Best]:
    """Return the best of every cell and model, in the order of the files, each with its model's name."""
    entries = [(sweep, entry) for sweep in sweeps for entry in best_rows(sweep.rows, sweep.metric)]
    names = model_names([entry["model"] for _, entry in entries])
    return [
        _Best(
            sweep.label,
            entry["task"],
            entry["settings"],
            entry["model"],
            sweep.metric,
            entry["value"],
            f"{entry['learning_rate']:.2g}" if "learning_rate" in entry else _DASH,
            f"{sweep.label}: {name}" if len(sweeps) > 1 else name,
        )
        for (sweep, entry), name in zip(entries, names, strict=True)
    ]


def _share(value: float | None) -> str:
    return _DASH if value is None else f"{value:.3f}"


def _metrics(found: Sequence[_Best]) -> str:
    return " and ".join(dict.fromkeys(entry.metric.replace("_", " ") for entry in found))


def mqar(inputs: Inputs) -> Section | None:
    """Multi-query associative recall: a map per model, and beside each number what is published."""
    found = [entry for entry in _best(inputs.sweeps) if entry.task == _MQAR and _has_place(entry.settings)]
    if not found:
        return None
    titles = [
        " ".join(filter(None, (entry.name, rest)))
        for entry, rest in zip(found, setting_names([e.settings for e in found], ("length", "pairs")), strict=True)
    ]
    widths = sorted({entry.model["hidden_size"] for entry in found})
    cells = sorted({_place(entry.settings) for entry in found})
    maps = {title: np.full((len(widths), len(cells)), np.nan) for title in titles}
    rows = []
    for title, entry in zip(titles, found, strict=True):
        place = _place(entry.settings)
        if entry.value is not None:
            maps[title][widths.index(entry.model["hidden_size"]), cells.index(place)] = entry.value
        published = published_mqar(entry.model, entry.settings)
        numbers = (f"{entry.model['hidden_size']:,}", f"{place[0]:,}", f"{place[1]:,}")
        rows.append((title, *numbers, _share(entry.value), _share(published), entry.rate))
    header = ("model", "width", "length", "pairs", _metrics(found), "published", "learning rate")
    plot = Plot(
        mqar_maps(maps, widths, cells, "mqar"),
        f"MQAR: {_metrics(found)} in percent, the best over learning rates and weight decays. A name with +R0 has "
        "retrieval in layer 0.",
        "How to read it: where a row fades to the right, a model of this width can hold no more pairs. In a map that "
        "fades nowhere, all pairs are held.",
        Table(f"MQAR: {_metrics(found)}", header, tuple(rows), hidden=True),
    )
    return Section("mqar", "Multi-query associative recall", [plot])


def sweep_in_words(sweep: Sweep) -> Words | None:
    """What a sweep comes to: of each model the mean over its cells, and the worst of them."""
    found = _best([sweep])
    if not found:
        return None
    told, several = [], len({entry.task for entry in found}) > 1
    for name in dict.fromkeys(entry.name for entry in found):
        mine = [entry for entry in found if entry.name == name]
        cells = setting_names([{**entry.settings, "width": entry.model["hidden_size"]} for entry in mine])
        values = [entry.value or 0.0 for entry in mine]
        worst = min(range(len(mine)), key=lambda place: values[place])
        metric = _metrics(mine)
        sentence = f"{metric[:1].upper()}{metric[1:]} {sum(values) / len(values):.1%}"
        if len(mine) > 1:
            where = ", ".join(filter(None, (wording_of(mine[worst].task).title if several else "", cells[worst])))
            sentence += f", mean over {len(mine)} cells; worst {values[worst]:.1%}" + (f" ({where})" if where else "")
        told.append((name, f"{sentence}.", ""))
    asked = [wording_of(task) for task in dict.fromkeys(entry.task for entry in found)]
    models = f"{len(told)} {'model' if len(told) == 1 else 'models'}"
    opening = f"{sweep.label}: {models} trained from scratch. In a name +R0 is retrieval in layer 0."
    method = (
        "Each cell counts with its best learning rate and weight decay; a run that did not finish counts as 0. Each "
        "setting was run once, so there is no interval: small differences may be chance."
    )
    tasks = tuple((words.title, words.explanation, "") for words in asked if words.explanation)
    return Words(opening, (*tasks, *told), method)


def _has_place(settings: Mapping[str, Any]) -> bool:
    return all(isinstance(settings.get(key), int) for key in ("length", "pairs"))


def _place(settings: Mapping[str, Any]) -> tuple[int, int]:
    return settings["length"], settings["pairs"]


def mad(inputs: Inputs) -> Section | None:
    """The MAD suite: a row per model, a column per task, the mean over a task's cells in each."""
    found = [entry for entry in _best(inputs.sweeps) if entry.task in RESONA_TABLE_1_COLUMNS]
    if not found:
        return None
    names = [f"{entry.name} width {entry.model['hidden_size']}" for entry in found]
    rows = []
    for name in dict.fromkeys(names):
        mine = [entry for entry, other in zip(found, names, strict=True) if other == name]
        rows.append((name, *_suite(mine)))
        published = published_mad(mine[0].model["mixer"], bool(retrieval_layers(mine[0].model)))
        if published is not None:
            mean = sum(published) / len(published)
            rows.append((f"published: {mine[0].name}", *map(_share, published), _share(mean)))
    note = Note(
        f"Mean over the cells of a task ({_metrics(found)}), with the best learning rate and weight decay of each "
        "cell. Under it is the number of cells; the published suite has 66. The last column is the mean over "
        "the six tasks, where all six were run. Published rows are table 1 of the RESONA paper, of the whole suite."
    )
    cells = setting_names([entry.settings for entry in found])
    every = tuple(
        (name, entry.task, cell or _DASH, _share(entry.value), entry.rate)
        for name, entry, cell in zip(names, found, cells, strict=True)
    )
    header = ("model", "task", "cell", _metrics(found), "learning rate")
    blocks: list[Block] = [
        note,
        Table("MAD suite", ("model", *_MAD_WORDS, "mean"), tuple(rows)),
        Table("MAD suite, cell by cell", header, every, hidden=True),
    ]
    return Section("mad", "The MAD suite", blocks)


def _suite(found: Sequence[_Best]) -> list[str]:
    """Return a model's mean over the cells of each task, and the mean of these; a cell in which no run ended is 0."""
    texts, means = [], []
    for task in RESONA_TABLE_1_COLUMNS:
        values = [entry.value for entry in found if entry.task == task]
        if not any(value is not None for value in values):
            texts.append(_DASH)
            continue
        means.append(sum(value or 0.0 for value in values) / len(values))
        texts.append(f"{means[-1]:.3f}\n{len(values)} {'cell' if len(values) == 1 else 'cells'}")
    return [*texts, _share(sum(means) / len(means)) if len(means) == len(RESONA_TABLE_1_COLUMNS) else _DASH]


def other_cells(inputs: Inputs) -> Section | None:
    """Every cell of the tasks without a section of their own, and the runs that did not end well."""
    if not inputs.sweeps:
        return None
    blocks: list[Block] = []
    rest = [
        entry
        for entry in _best(inputs.sweeps)
        if entry.task not in RESONA_TABLE_1_COLUMNS and not (entry.task == _MQAR and _has_place(entry.settings))
    ]
    if rest:
        names = setting_names([entry.settings for entry in rest])
        rows = tuple(
            (entry.name, f"{entry.model['hidden_size']:,}", entry.task, cell or _DASH, _share(entry.value), entry.rate)
            for entry, cell in zip(rest, names, strict=True)
        )
        header = ("model", "width", "task", "cell", _metrics(rest), "learning rate")
        blocks.append(Table("The best over learning rates and weight decays", header, rows))
    counts, reasons = [], []
    for sweep in inputs.sweeps:
        states = [row["status"] for row in sweep.rows]
        planned = sweep.data.get("runs")
        left = planned - len(states) if isinstance(planned, int) else 0
        numbers = (states.count("done"), states.count("diverged"), states.count("failed"), left)
        counts.append((sweep.label, f"{len(states):,}", *map(str, numbers)))
        failed = [str(row.get("reason", _DASH)) for row in sweep.rows if row["status"] == "failed"]
        reasons += [(sweep.label, reason, f"{failed.count(reason):,}") for reason in dict.fromkeys(failed)]
    blocks.append(Table("Runs", ("file", "rows", "done", "diverged", "failed", "still to run"), tuple(counts)))
    if reasons:
        blocks.append(Table("Why runs failed", ("file", "reason", "runs"), tuple(reasons)))
    return Section("sweeps", "Runs of the sweeps", blocks)
