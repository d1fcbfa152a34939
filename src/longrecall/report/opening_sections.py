"""What a page opens with: the verdict in words, of whatever kinds its files are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from longrecall.evaluation.verdict import CONTROL, Verdict, all_in_words, describe_in_words
from longrecall.report.blocks import Block, Section, Words, with_interval
from longrecall.report.inputs import Evaluation, Inputs, Training
from longrecall.report.summaries import MOST_BESIDE, Headline, Number, before_and_after, control_of, headlines
from longrecall.report.sweep_sections import sweep_in_words

_STANDINGS = (
    "Clearly behind: the 95% intervals of the two do not overlap. longrecall compare tests two files question by "
    "question, which can separate closer results."
)
_MOST_ALONE = 4
"""Files that are described one by one where nothing is compared; tables have the others."""


def title_of(inputs: Inputs) -> str:
    """Return a heading for the page that fits what its files are."""
    pair = before_and_after(inputs.evaluations)
    if pair is not None and len(inputs.evaluations) <= MOST_BESIDE:
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
    if (standings := _standings_in_words(inputs.evaluations)) is not None:
        blocks.append(standings)
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


def _standings_in_words(evaluations: Sequence[Evaluation]) -> Words | None:
    """Which of many checkpoints is best in each quantity; None for few, which are compared two by two."""
    if len(evaluations) <= MOST_BESIDE:
        return None
    told = []
    firsts: Counter[str] = Counter()
    for row in headlines(evaluations):
        ranked = row.best_first(evaluations)
        if len({number.value for _, number in ranked}) < 2:
            continue
        best = [entry.label for entry, number in ranked if number.value == ranked[0][1].value]
        firsts.update(best)
        told.append((f"{row.name[:1].upper()}{row.name[1:]}", _standing(row, ranked, best), ""))
    if not told:
        return None
    (winner, count), *_ = firsts.most_common()
    alike = [label for label, wins in firsts.items() if wins == count]
    who = winner if len(alike) == 1 else f"{', '.join(alike[:-1])} and {alike[-1]} each"
    opening = f"Of {len(evaluations)} checkpoints {who} has the best number in {count} of {len(told)} quantities."
    return Words(opening, tuple(told), _STANDINGS)


def _standing(row: Headline, ranked: Sequence[tuple[Evaluation, Number]], best: Sequence[str]) -> str:
    """Who is first, who follows and whether clearly, and who is last."""

    def named(place: int) -> str:
        entry, number = ranked[place]
        return f"{entry.label} ({with_interval(Number(number.value), row.digits)})"

    first, after = ranked[0][1], ranked[len(best)][1]
    value = with_interval(Number(first.value), row.digits)
    leading = named(0) if len(best) == 1 else f"{', '.join(best[:-1])} and {best[-1]} alike ({value})"
    words = f"Best: {leading}; next {named(len(best))}"
    if None not in (first.low, first.high, after.low, after.high):
        ends = (first.low, after.high) if row.more_is_better else (after.low, first.high)
        words += ", clearly behind" if (ends[0] or 0.0) > (ends[1] or 0.0) else ", not clearly behind"
    return f"{words}. Last: {named(-1)}." if len(ranked) > len(best) + 1 else f"{words}."


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
