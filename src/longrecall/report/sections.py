"""The sections of a report, each made from what the result files hold; one that has nothing to show is left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from longrecall.models.accounting import CACHE_BYTES, STATE_BYTES
from longrecall.report import (
    diagnosis_sections,
    length_sections,
    opening_sections,
    overview_sections,
    plots,
    sweep_sections,
    task_sections,
)
from longrecall.report.blocks import BEST, Block, Note, Plot, Section, Table, with_interval
from longrecall.report.diagnoses import Diagnosis
from longrecall.report.inputs import Evaluation, Inputs, Training
from longrecall.report.summaries import (
    MOST_BESIDE,
    Headline,
    before_and_after,
    control_of,
    headlines,
)
from longrecall.report.sweeps import Sweep
from longrecall.report.tables import cell_keys, cell_table, explained, plotted
from longrecall.units import format_bytes

_MOST_LOG_ROWS = 40


def all_sections(inputs: Inputs) -> list[Section]:
    """Return the sections of a page in reading order."""
    makers = (
        opening_sections.in_words,
        headline,
        control,
        overview_sections.slopes,
        overview_sections.state_size,
        diagnosis_sections.verdict,
        *task_sections.makers(shares=True),
        length_sections.other_lengths,
        *task_sections.makers(shares=False),
        diagnosis_sections.perplexity,
        diagnosis_sections.state,
        diagnosis_sections.remembrance,
        diagnosis_sections.recall,
        sweep_sections.mqar,
        sweep_sections.mad,
        sweep_sections.other_cells,
        sizes,
        training,
        other_tasks,
        provenance,
    )
    return [section for section in (make(inputs) for make in makers) if section is not None]


def headline(inputs: Inputs) -> Section | None:
    """The few numbers that matter: one row each, a column per file, and what changed."""
    evaluations = inputs.evaluations
    rows = headlines(evaluations)
    if not rows:
        return None
    pair = before_and_after(evaluations)
    if len(evaluations) > MOST_BESIDE:
        return Section("headline", "All checkpoints", [_standings(evaluations, rows), *_changes(pair, rows)])
    header = ["quantity", *(evaluation.label for evaluation in evaluations)]
    if pair is not None:
        header.append(f"{pair[1].label} − {pair[0].label}")
    body = []
    for row in rows:
        cells = [row.name, *(with_interval(row.number(evaluation), row.digits) for evaluation in evaluations)]
        if pair is not None:
            cells.append(with_interval(row.change(*pair), row.digits, signed=True))
        body.append(tuple(cells))
    table = Table("Headline numbers with 95% intervals", tuple(header), tuple(body), last_counts=pair is not None)
    blocks: list[Block] = [table]
    if pair is not None:
        blocks.append(
            Note(
                "Each interval is for its own row. Where both files were asked the same questions, a difference "
                "compares each question with itself. Otherwise the two count as independent, and the interval is "
                "wider."
            )
        )
    return Section("headline", "What changed" if pair else "Headline numbers", blocks)


def _standings(evaluations: Sequence[Evaluation], rows: Sequence[Headline]) -> Table:
    """A row for each checkpoint, a column for each quantity; the best number of a column says so."""
    best: dict[str, float | None] = {}
    for row in rows:
        ranked = row.best_first(evaluations)
        different = len({number.value for _, number in ranked}) > 1
        best[row.name] = ranked[0][1].value if different else None
    body = []
    for evaluation in evaluations:
        cells = [evaluation.label]
        for row in rows:
            number = row.number(evaluation)
            mark = f"\n{BEST}" if number.value is not None and number.value == best[row.name] else ""
            cells.append(with_interval(number, row.digits) + mark)
        body.append(tuple(cells))
    header = ("checkpoint", *(row.name for row in rows))
    return Table("Headline numbers with 95% intervals, a row per checkpoint", header, tuple(body))


def _changes(pair: tuple[Evaluation, Evaluation] | None, rows: Sequence[Headline]) -> list[Block]:
    """The difference of two of many checkpoints."""
    if pair is None:
        return []
    first, second = pair
    body = [
        (
            row.name,
            *(with_interval(row.number(entry), row.digits) for entry in pair),
            with_interval(row.change(first, second), row.digits, signed=True),
        )
        for row in rows
    ]
    header = ("quantity", first.label, second.label, f"{second.label} − {first.label}")
    return [Table(f"{second.label} against {first.label}", header, tuple(body), last_counts=True)]


def control(inputs: Inputs) -> Section | None:
    """Enlarged and trained, against the same training without the larger state."""
    against = control_of(inputs.evaluations)
    pair = before_and_after(inputs.evaluations)
    others = [entry for entry in inputs.evaluations if entry is not against]
    if against is None or not others:
        return None
    after = pair[1] if pair is not None else others[-1]
    rows = []
    for row in headlines([against, after]):
        numbers = (with_interval(row.number(entry), row.digits) for entry in (against, after))
        rows.append((row.name, *numbers, with_interval(row.change(against, after), row.digits, signed=True)))
    header = ("quantity", against.label, after.label, f"{after.label} − {against.label}")
    note = (
        f"“{against.label}” was trained on without surgery. The last column shows what the larger state gives beyond "
        "more training. The comparison is fair only if both saw equally many tokens of the same data."
    )
    table = Table(f"{after.label} against plain continued training", header, tuple(rows), last_counts=True)
    return Section("control", "Compared with plain continued training", [table, Note(note)])


def other_tasks(inputs: Inputs) -> Section | None:
    """Every metric without a plot of its own, as tables."""
    metrics = dict.fromkeys((m.task, m.metric) for e in inputs.evaluations for m in e.measurements)
    drawn = plotted() | length_sections.drawn(inputs.evaluations)
    blocks: list[Block] = []
    told = {task for task, _ in drawn}
    for task, metric in metrics:
        if (task, metric) not in drawn:
            blocks += explained(task) if task not in told else []
            told.add(task)
            blocks.append(cell_table(inputs.evaluations, task, metric, cell_keys(inputs.evaluations, task, metric)))
    return Section("more", "More measurements", blocks) if blocks else None


def sizes(inputs: Inputs) -> Section | None:
    """Parameters and state before and after, and the surgery between."""
    entries = sized(inputs)
    if not entries:
        return None
    first = entries[0].data["checkpoint"]
    rows = []
    history: list[tuple[str, ...]] = []
    for evaluation in entries:
        checkpoint = evaluation.data["checkpoint"]
        state = checkpoint.get("state_size")
        rows.append(
            (
                evaluation.label,
                _integer(checkpoint.get("parameters")) + _ratio(checkpoint, first, "parameters"),
                _integer(state) + _ratio(checkpoint, first, "state_size"),
                format_bytes(STATE_BYTES * state) if isinstance(state, int) else "–",
                *_transformer_cache(checkpoint),
            )
        )
        history.extend((evaluation.label, *_record(record)) for record in checkpoint.get("surgery") or [])
    header = (
        "checkpoint",
        "parameters",
        "numbers in the recurrent state",
        "state of one sequence, float32",
        "a Transformer's cache, 16 bit",
        "average size of that cache, as a multiple of the state",
    )
    yardstick = (
        "A Transformer of the checkpoint's width and depth keeps one key and one value of full width per layer and "
        "token. Its cache is counted at the context length of the checkpoint's training. On average over that text "
        "it is half full."
    )
    recorded = any(isinstance(entry.data["checkpoint"].get("transformer_cache"), int) for entry in entries)
    shown = len(header) if recorded else len(header) - 2
    blocks: list[Block] = [Table("Parameters and state sizes", header[:shown], tuple(row[:shown] for row in rows))]
    blocks += [Note(yardstick)] if recorded else []
    if history:
        columns = (
            "checkpoint",
            "method",
            "init",
            "layers",
            "seed",
            "options",
            "state",
            "parameters",
            "tensors touched",
        )
        blocks.append(Table("Surgery", columns, tuple(history)))
    return Section("sizes", "State and parameters", blocks)


def sized(inputs: Inputs) -> list[Evaluation | Diagnosis]:
    """Return a file for each checkpoint: its evaluation, else its diagnosis."""
    labels = {evaluation.label for evaluation in inputs.evaluations}
    return [*inputs.evaluations, *(entry for entry in inputs.diagnoses if entry.label not in labels)]


def training(inputs: Inputs) -> Section | None:
    """Training curves."""
    runs = [run for run in inputs.trainings if run.log]
    if not runs:
        return None
    rows = []
    for run in runs:
        step = max(1, -(-len(run.log) // _MOST_LOG_ROWS))
        for row in run.log[::step]:
            tokens = _integer(row.get("tokens"))
            rate = row.get("learning_rate")
            rows.append(
                (run.label, f"{row['step']:,}", tokens, f"{row['loss']:.4f}", "–" if rate is None else f"{rate:.3g}")
            )
    header = ("run", "step", "tokens", "loss", "learning rate")
    data = Table(f"Training log (at most {_MOST_LOG_ROWS} rows a run)", header, tuple(rows), hidden=True)
    caption = "Training loss: every logged value (faint) and its running mean."
    reading = "How to read it: compare runs at the same number of tokens; the lower line has learned more from them."
    plot = Plot(plots.training_plot(runs, inputs.labels, "training"), caption, reading, data)
    return Section("training", "Training", [plot])


def provenance(inputs: Inputs) -> Section:
    """Where every number comes from."""
    rows = []
    entries: list[Evaluation | Diagnosis | Training | Sweep] = [*inputs.evaluations, *inputs.diagnoses]
    entries += [*inputs.trainings, *inputs.sweeps]
    for entry in entries:
        data = entry.data
        made_with = {"longrecall": data.get("longrecall", "–")} | (data.get("environment") or {})
        checkpoint = data.get("checkpoint") if isinstance(data.get("checkpoint"), dict) else {}
        rows.append(
            (
                entry.label,
                str(data["kind"]),
                _when(data.get("created")),
                ", ".join(f"{name} {version}" for name, version in made_with.items()),
                str((checkpoint or {}).get("fingerprint") or "–")[:16],
                entry.source,
            )
        )
    header = ("label", "kind", "created", "made with", "checkpoint fingerprint", "file")
    blocks: list[Block] = [Table("Result files", header, tuple(rows))]
    for entry in entries:
        what = "recipe" if entry.data["kind"] in ("training", "sweep") else "settings"
        settings = entry.data.get(what)
        flat = tuple((name, value) for name, value in _flatten(settings or {}) if value)
        if flat:
            blocks.append(Table(f"{entry.label}, {entry.data['kind']}: {what}", ("name", "value"), flat, hidden=True))
    return Section("provenance", "Where these numbers come from", blocks)


def _when(created: Any) -> str:
    """Return a time of day as people write it; what is none stays as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (TypeError, ValueError, OverflowError):
        return str(created or "–")


def _integer(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "–"


def _transformer_cache(checkpoint: Mapping[str, Any]) -> tuple[str, str]:
    """The cache of a Transformer of this width and depth, and its average over the context as a multiple of the state.

    Source: equations 3 and 4 of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".
    """
    per_token, context, state = (checkpoint.get(key) for key in ("transformer_cache", "context_length", "state_size"))
    if not isinstance(per_token, int):
        return "not recorded", "–"
    if not isinstance(context, int):
        return f"{format_bytes(CACHE_BYTES * per_token)} a token", "–"
    size = f"{format_bytes(CACHE_BYTES * per_token * context)} at {context:,} tokens"
    return size, f"×{per_token * context / 2 / state:,.2f}" if isinstance(state, int) and state else "–"


def _ratio(checkpoint: Mapping[str, Any], first: Mapping[str, Any], key: str) -> str:
    now, base = checkpoint.get(key), first.get(key)
    if not isinstance(now, int) or not isinstance(base, int) or base == 0 or now == base:
        return ""
    return f" (×{now / base:.3g})"


def _record(record: Mapping[str, Any]) -> tuple[str, ...]:
    options = record.get("options") or {}
    return (
        str(record.get("method", "–")),
        str(record.get("init", "–")),
        ", ".join(str(layer) for layer in record.get("layers", ())) or "–",
        str(record.get("seed", "–")),
        ", ".join(f"{name} {value}" for name, value in options.items()) or "–",
        _change(record.get("state_size") or {}),
        _change(record.get("parameters") or {}),
        _integer(len(record.get("touched", ()))),
    )


def _change(counts: Mapping[str, Any]) -> str:
    before, after = counts.get("before"), counts.get("after")
    # Retrieval adds to what a layer can look up, and leaves its state alone.
    return f"{_integer(before)} (unchanged)" if before == after else f"{_integer(before)} → {_integer(after)}"


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
