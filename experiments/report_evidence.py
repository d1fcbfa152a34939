"""Turn the recorded results into the tables of docs/evidence.md and the figures of docs/figures.

Usage: python experiments/report_evidence.py            rewrites what stands between the markers, and the figures
       python experiments/report_evidence.py --check    changes nothing; exit code 1 when a table is out of date

Intervals are 95%. A share of three models (one per seed) has the Student t interval over the models, 2 degrees of
freedom, widened to the Wilson interval of the pooled counts where that is wider; the Wilson interval uses the effective
number of answers, since answers of one phone book hang together. A difference between two arms is taken seed by seed,
where both read the same batches and answered the same questions, and has the t interval over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from longrecall.evaluation.statistics import wilson_interval

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
ARMS = ("plain", "reinit", "inherit", "preserve", "perturb", "handover")
STUDIES = {
    "mamba2_two_letter": "post_training_mamba2.json",
    "mamba2_one_letter": "post_training_mamba2_one_letter.json",
    "gla_two_letter": "post_training_gla.json",
}
T_TWO_DEGREES = 4.302652729911275
"""97.5% quantile of Student's t with 2 degrees of freedom: three seeds."""
MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Study = dict[str, Any]
Row = dict[str, Any]


def read(name: str) -> Any:
    """One recorded file."""
    return json.loads((RESULTS / name).read_text())


def rows_of(study: Study, arm: str, passing: bool | None) -> list[Row]:
    """The models of one arm in the order of their seeds; the base has no `state_passing` (None)."""
    found = [r for r in study["results"] if r["arm"] == arm and r.get("state_passing") == passing]
    return sorted(found, key=lambda r: r.get("seed", 0))


def variants(study: Study) -> list[tuple[str, bool | None]]:
    """The lines of a table: the base as it was, then every arm without and with state passing."""
    return [("base", None)] + [(arm, passing) for arm in ARMS for passing in (False, True)]


def t_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95% t interval over three seeds."""
    if len(values) != 3:
        raise ValueError(f"three seeds expected, not {len(values)}")
    return statistics.mean(values), T_TWO_DEGREES * statistics.stdev(values) / math.sqrt(3)


def answers(row: Row, task: str, cell: str) -> tuple[int, int, float]:
    """(right, asked, effective number of answers) of one model in one cell."""
    right, asked, *error = row[task][cell]
    share = right / asked
    independent = share * (1 - share) / asked
    effect = max(1.0, error[0] ** 2 / independent) if error and independent else 1.0
    return right, asked, asked / effect


def share(rows: list[Row], task: str, cell: str) -> tuple[float, float, float, int]:
    """(share of right answers, low, high, answers) pooled over the models of `rows`."""
    counts = [answers(row, task, cell) for row in rows]
    right, asked, effective = (sum(c[i] for c in counts) for i in range(3))
    value = right / asked
    low, high = wilson_interval(value * effective, effective)
    if len(rows) == 3:
        centre, half = t_interval([c[0] / c[1] for c in counts])
        low, high = min(low, centre - half), max(high, centre + half)
    return value, max(0.0, low), min(1.0, high), int(asked)


def number(value: float, signed: bool = False) -> str:
    """Three decimals without the zero before the point."""
    return f"{value:+.3f}".replace("0.", ".", 1) if signed else f"{value:.3f}".removeprefix("0")


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table; the first two columns are text."""
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines]) + "\n"


def label(passing: bool | None) -> str:
    """How a table says whether state passing was on."""
    return "" if passing is None else "on" if passing else "off"


def shares_table(study: Study, task: str, unit: str) -> str:
    """Share of right answers with its interval, one column per cell; the answers in the last line."""
    cells = list(study["results"][0][task])
    lines = []
    for arm, passing in variants(study):
        found = [share(rows_of(study, arm, passing), task, cell) for cell in cells]
        lines.append([arm, label(passing)] + [f"{number(v)} [{number(a)}, {number(b)}]" for v, a, b, _ in found])
    base, arms = (share(rows_of(study, *which), task, cells[0])[3] for which in (("base", None), ("plain", False)))
    return table(["arm", "passing", *(f"{c} {unit}" for c in cells)], lines) + (
        f"\nAnswers in every cell: {base} for the base, {arms} for an arm (three models).\n"
    )


def recall_table(study: Study) -> str:
    return shares_table(study, "phonebook", "pairs")


def passkey_table(study: Study) -> str:
    return shares_table(study, "passkey", "tokens")


def against_plain_table(study: Study) -> str:
    """Recall minus that of plain continued training, seed by seed; bold where the interval leaves out zero."""
    cells = [c for c in study["results"][0]["phonebook"] if int(c) >= 4]
    lines = []
    for arm in ARMS[1:]:
        for passing in (False, True):
            pairs = list(zip(rows_of(study, arm, passing), rows_of(study, "plain", passing), strict=True))
            lines.append([arm, label(passing)] + [difference(pairs, cell) for cell in cells])
    return table(["arm", "passing", *(f"{c} pairs" for c in cells)], lines)


def difference(pairs: list[tuple[Row, Row]], cell: str) -> str:
    """Mean difference of the recall of paired models ± half the t interval."""
    return signed_with_error(*t_interval([right(a, "phonebook", cell) - right(b, "phonebook", cell) for a, b in pairs]))


def right(row: Row, task: str, cell: str) -> float:
    """Share of right answers of one model."""
    count, asked = row[task][cell][:2]
    return count / asked


def signed_with_error(mean: float, half: float) -> str:
    text = f"{number(mean, signed=True)} ± {number(half)}"
    return f"**{text}**" if abs(mean) > half else text


def spans(study: Study) -> list[str]:
    """Names of the ranges of positions."""
    names = [f"{e // 1024}k" if e >= 1024 else str(e) for e in study["settings"]["edges"]]
    return [f"{a}–{b}" for a, b in itertools.pairwise(names)]


def bits(rows: list[Row]) -> list[float]:
    """Bits per byte in each range, mean over the models."""
    return [statistics.mean(v) for v in zip(*([b for b, _ in row["bits_per_byte"]] for row in rows), strict=True)]


def bits_table(study: Study) -> str:
    """Bits per byte by position, and their change from 512–1k to 8k–16k with its interval over the seeds."""
    names = spans(study)
    first, last = names.index("512–1k"), names.index("8k–16k")
    lines = []
    for arm, passing in variants(study):
        rows = rows_of(study, arm, passing)
        rises = [row["bits_per_byte"][last][0] - row["bits_per_byte"][first][0] for row in rows]
        rise = signed_with_error(*t_interval(rises)) if len(rises) == 3 else number(rises[0], signed=True)
        lines.append([arm, label(passing)] + [f"{b:.3f}" for b in bits(rows)] + [rise])
    return table(["arm", "passing", *names, "change from 512–1k to 8k–16k"], lines)


def passing_table(study: Study) -> str:
    """What state passing changes, seed by seed: recall, the pass key and bits per byte with it minus without."""
    books = [c for c in study["results"][0]["phonebook"] if int(c) in (4, 8, 16, 24, 32)]
    keys = [c for c in study["results"][0]["passkey"] if int(c) in (512, 2048, 16384)]
    names = spans(study)
    lines = []
    for arm in ARMS:
        pairs = list(zip(rows_of(study, arm, True), rows_of(study, arm, False), strict=True))
        found = [difference(pairs, c) for c in books]
        found += [
            signed_with_error(*t_interval([right(a, "passkey", c) - right(b, "passkey", c) for a, b in pairs]))
            for c in keys
        ]
        for span in ("0–256", "8k–16k"):
            i = names.index(span)
            values = [a["bits_per_byte"][i][0] - b["bits_per_byte"][i][0] for a, b in pairs]
            found.append(signed_with_error(*t_interval(values)))
        lines.append([arm, "on − off", *found])
    head = [*(f"{c} pairs" for c in books), *(f"key at {c}" for c in keys), "bits 0–256", "bits 8k–16k"]
    return table(["arm", "passing", *head], lines)


def rates_table(study: Study) -> str:
    """What each rate of the touched parameters scored in the selection."""
    rates = sorted({r["rate"] for r in study["selection"]})
    lines = []
    for arm in ARMS:
        scores = {r["rate"]: r["score"] for r in study["selection"] if r["arm"] == arm}
        best = max(scores, key=lambda rate: scores[rate])
        shown = [f"**{number(scores[r])}**" if r == best else number(scores[r]) for r in rates]
        lines.append([arm, f"{float(study['settings']['learning_rate']):g}", *shown])
    return table(["arm", "rate of the rest", *(f"touched at {r:g}" for r in rates)], lines)


def sweep_table() -> str:
    """The long runs of the exploration: one seed each."""
    lines = []
    for row in read("sweep_recipes.json"):
        if row["steps"] == 2000:
            shape = "one-letter" if row["shape"] == [1, 1] else "two-letter"
            size = f"{row['steps']} × {row['B']} × {row['T']}"
            lines.append([f"{row['base']}, {shape}, {size}", row["arm"], *(number(v) for v in row["phonebook"])])
    return table(["run", "arm", "2 pairs", "4", "8", "16", "24 (two-letter: 32)"], lines)


def pretraining_table() -> str:
    """The last look at both base models."""
    log = read("pretraining.json")
    final = [row for row in log if row["step"] == max(r["step"] for r in log)]
    pairs, lengths = list(final[0]["phonebook"]), list(final[0]["passkey"])
    lines = [
        ["GLA" if row["name"].startswith("gla") else "Mamba-2", str(row["step"])]
        + [number(row["phonebook"][p]) for p in pairs]
        + [number(row["passkey"][n]) for n in lengths]
        for row in final
    ]
    return table(["base", "steps", *(f"{p} pairs" for p in pairs), *(f"key at {n}" for n in lengths)], lines)


MAKERS: dict[str, Callable[[Study], str]] = {
    "recall": recall_table,
    "against plain": against_plain_table,
    "passing": passing_table,
    "passkey": passkey_table,
    "bits": bits_table,
    "rates": rates_table,
}


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker: `{maker} of {study}`, `sweep`, `pretraining`."""
    made = {"sweep": sweep_table(), "pretraining": pretraining_table()}
    for name, file in STUDIES.items():
        study = read(file)
        made |= {f"{kind} of {name}": make(study) for kind, make in MAKERS.items()}
    return made


def renewed(page: str) -> str:
    """The page with what stands between its markers made anew; a marker that names no table is an error."""
    made = tables()
    return MARKED.sub(lambda m: f"{m[1]}\n{made[m[2]]}\n{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a table is out of date")
    args = parser.parse_args()
    path = DOCS / "evidence.md"
    page = path.read_text(encoding="utf-8")
    fresh = renewed(page)
    if args.check:
        raise SystemExit(int(fresh != page))
    path.write_text(fresh, encoding="utf-8")
    from evidence_figures import draw

    draw(DOCS / "figures")


if __name__ == "__main__":
    main()
