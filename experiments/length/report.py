"""Turn the three runs of experiment.py into the tables of docs/length_generalization.md and its folder, and figures.

Usage: python -m experiments.length.report            rewrites the tables and the figures
       python -m experiments.length.report --check    changes nothing; exit code 1 when a table is stale

Every arm has three models, one per seed; all models answered the same questions. A value is the mean over the seeds;
± is half the 95% Student t interval over them (2 degrees of freedom). A difference is taken seed by seed. The rise of a
model that was not post-trained has the interval over the 16 windows of text that the run recorded.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from experiments.common import pages
from experiments.common.intervals import t_interval
from experiments.common.pages import number, read, signed_with_error, table
from experiments.length.records import (
    ARMS,
    ILL,
    MEASURES,
    MODELS,
    NAMES,
    RUNS,
    SPANS,
    STORY_LENGTHS,
    Row,
    differences,
    growth,
    record_of,
    remembrance,
    rows_of,
    span_name,
    state_size,
    stories,
)

PAGE = "length_generalization.md"
STARTS = (64, 512, 1024, 2048, 3072, 3840)
"""The t of EffRem that the table shows; the figure has all."""
LEVELS = tuple(name for name in MEASURES if name != "stories")
DIFFERENCES = tuple(name for name in MEASURES if name not in (f"bits {span_name(*span)}" for span in SPANS[1:4]))


def level(rows: list[Row], name: str) -> str:
    """Mean of a measure; the rise with its interval."""
    values = [MEASURES[name](row) for row in rows]
    if name != "rise":
        return number(statistics.mean(values))
    if len(rows) > 1:
        # Never bold: the interval over seeds leaves out the luck of the text, which all models read.
        mean, half = t_interval(values)
        return f"{number(mean, True)} ± {number(half)}"
    last = rows[0]["perplexity"][-1]
    return f"{number(values[0], True)} [{number(last['rise_low'], True)}, {number(last['rise_high'], True)}]"


def levels_table(model: str) -> str:
    """Every arm of one model: mean over the seeds."""
    record = record_of(model)
    lines = [[NAMES[arm], *(level(rows_of(record, model, arm), name) for name in LEVELS)] for arm in ("before", *ARMS)]
    return table(["arm", *LEVELS], lines, texts=1)


def shown_differences(model: str, arm: str) -> list[str]:
    """An intervention minus plain continued training in every column of DIFFERENCES."""
    record = record_of(model)
    return [signed_with_error(*differences(record, model, arm, name)) for name in DIFFERENCES]


def against_table(model: str) -> str:
    """Every intervention on one model minus plain continued training."""
    lines = [[NAMES[arm], *shown_differences(model, arm)] for arm in ARMS[1:]]
    return table(["arm", *DIFFERENCES], lines, texts=1)


def healthy_table() -> str:
    """The other models: plain continued training, and what every intervention adds to it."""
    lines = []
    for model in MODELS:
        if model not in ILL:
            plain = rows_of(record_of(model), model, "zero")
            lines.append([model, NAMES["zero"], *(level(plain, name) for name in DIFFERENCES)])
            lines += [[model, f"{NAMES[arm]} − zero", *shown_differences(model, arm)] for arm in ARMS[1:]]
    return table(["model", "arm", *DIFFERENCES], lines)


def between(values: list[float]) -> str:
    """The smallest and the largest."""
    return f"{number(min(values), digits=2)}–{number(max(values), digits=2)}"


def models_table() -> str:
    """Every model that was pretrained and measured, before any post-training."""
    lines = []
    for run, file in RUNS.items():
        record = read(file)
        for name, row in record["variants"].items():
            heads = [value for layer in growth(row) for value in layer]
            shown = f"**{name}**" if MODELS.get(name) == run else name
            facts = [f"{state_size(row):,}", *(level([row], f"bits {span_name(*s)}") for s in (SPANS[0], SPANS[-1]))]
            far = number(remembrance(row, 2048)["value"], digits=4)
            lines.append([shown, run, *facts, level([row], "rise"), between(heads), far, level([row], "64 letters")])
    head = ["model", "run", "state", "bits 0–512", "bits 32k–64k", "rise", "norm of a head, 64k over 512"]
    return table([*head, "EffRem(2048)", "64 letters"], lines)


def state_table(model: str) -> str:
    """Smallest and largest growth of a head's norm, layer by layer; mean over the seeds head by head."""
    record = record_of(model)
    lines = []
    for arm in ("before", *ARMS):
        grown = [growth(row) for row in rows_of(record, model, arm)]
        layers = [[statistics.mean(head) for head in zip(*layer, strict=True)] for layer in zip(*grown, strict=True)]
        # The head that never forgets would hide the others of its layer.
        first = sorted(layers[0])
        shown = [between(v) for v in (first[:-1], layers[1], layers[2])]
        lines.append([NAMES[arm], number(first[-1], digits=1), *shown])
    head = ["arm", "layer 1, the head that grows most", "layer 1, the others", "layer 2", "layer 3"]
    return table(head, lines, texts=1)


def remembrance_table() -> str:
    """EffRem_4096(t): the ill models before and after every arm, and the others before."""
    lines = []
    for model in MODELS:
        record = record_of(model)
        for arm in ("before", *ARMS) if model in ILL else ("before",):
            rows = rows_of(record, model, arm)
            cells = []
            for start in STARTS:
                values = [remembrance(row, start)["value"] for row in rows]
                half = f" ± {number(t_interval(values)[1], digits=4)}" if len(values) > 1 else ""
                cells.append(number(statistics.mean(values), digits=4) + half)
            lines.append([model, NAMES[arm], *cells])
    return table(["model", "arm", *(f"t = {t}" for t in STARTS)], lines)


def stories_table() -> str:
    """Exact match by length of the prompt, mean over the five tasks."""
    lines = []
    for model in MODELS:
        record = record_of(model)
        for arm in ("zero", "state_passing_text"):
            rows = rows_of(record, model, arm)
            shares = [statistics.mean(stories(row, (n,)) for row in rows) for n in STORY_LENGTHS]
            lines.append([model, NAMES[arm], *map(number, shares)])
    return table(["model", "arm", *(f"{n} tokens" for n in STORY_LENGTHS)], lines)


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker."""
    found = {"models": models_table()}
    for model in ILL:
        found |= {
            f"state of {model}": state_table(model),
            f"levels of {model}": levels_table(model),
            f"against zero of {model}": against_table(model),
        }
    return found | {
        "healthy": healthy_table(),
        "remembrance": remembrance_table(),
        "stories": stories_table(),
    }


def draw(folder: Path) -> None:
    """Draw the figures."""
    from experiments.length.figures import draw

    draw(folder)


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables, draw)
