"""What a page opens with: the verdict in words, of whatever kinds its files are."""

from __future__ import annotations

from collections.abc import Sequence

from longrecall.evaluation.verdict import CONTROL, Verdict, all_in_words, describe_in_words
from longrecall.report.blocks import Block, Section, Words
from longrecall.report.inputs import Evaluation, Inputs, Training
from longrecall.report.summaries import before_and_after, control_of
from longrecall.report.sweep_sections import sweep_in_words

_MOST_ALONE = 4
"""Files that are described one by one where nothing is compared; tables have the others."""


def title_of(inputs: Inputs) -> str:
    """Return a heading for the page that fits what its files are."""
    pair = before_and_after(inputs.evaluations)
    if pair is not None:
        return f"What the model remembers: {pair[0].label} and {pair[1].label}"
    labels = _labels(inputs.evaluations)
    if labels:
        return f"What the model remembers: {labels}"
    for words, entries in (
        ("Diagnosis", inputs.diagnoses),
        ("Small models trained from scratch", inputs.sweeps),
        ("Training", inputs.trainings),
    ):
        if entries:
            return f"{words}: {_labels(entries)}"
    return "Report"


def _labels(entries: Sequence[object]) -> str:
    names = [str(getattr(entry, "label", "")) for entry in entries]
    return ", ".join(names) if len(names) <= _MOST_ALONE else f"{names[0]} and {len(names) - 1} others"


def in_words(inputs: Inputs) -> Section | None:
    """What changed and what can be told, in the words of the terminal."""
    blocks: list[Block] = []
    explained: set[str] = set()
    for verdict in _verdicts(inputs.evaluations):
        told = []
        for statement in verdict.statements:
            asks = "" if statement.task in explained else statement.explanation
            told.append((statement.title, statement.sentence, asks))
            explained.add(statement.task)
        blocks.append(Words(verdict.opening, tuple(told), verdict.method))
    blocks += [words for words in map(sweep_in_words, inputs.sweeps) if words is not None]
    if not blocks and not inputs.diagnoses:
        blocks += [words for words in map(_training_in_words, inputs.trainings) if words is not None]
    return Section("in-words", "In short", blocks) if blocks else None


def _verdicts(evaluations: Sequence[Evaluation]) -> list[Verdict]:
    pair, control = before_and_after(evaluations), control_of(evaluations)
    rest = [entry for entry in evaluations if entry is not control]
    after = pair[1] if pair is not None else (rest[-1] if rest else None)
    compared = []
    if pair is not None:
        compared.append((pair[0].data, pair[1].data, (pair[0].label, pair[1].label), ""))
    if control is not None and after is not None:
        compared.append((control.data, after.data, (control.label, after.label), CONTROL))
    verdicts = all_in_words(compared)
    if verdicts:
        return verdicts
    alone = [describe_in_words(entry.data, entry.label) for entry in evaluations[:_MOST_ALONE]]
    return [verdict for verdict in alone if verdict is not None]


def _training_in_words(run: Training) -> Words | None:
    if not run.log:
        return None
    first, last = run.log[0], run.log[-1]
    tokens = last.get("tokens")
    seen = f" and {tokens:,} tokens" if isinstance(tokens, int) else ""
    opening = (
        f"{run.label}: the training loss went from {first['loss']:.3f} to {last['loss']:.3f} nats per token in "
        f"{last['step']:,} steps{seen}; what the model recalls is not measured here."
    )
    return Words(opening, (), "")
