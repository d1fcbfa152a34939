"""Turn the recorded results into the tables of docs/evidence.md and its folder, and the figures of docs/figures.

Usage: python -m experiments.evidence.report            rewrites what stands between the markers, and the figures
       python -m experiments.evidence.report --check    changes nothing; exit code 1 when a table is out of date

Intervals are 95%. A share of three models (one per seed) has the Student t interval over the models, 2 degrees of
freedom, widened to the Wilson interval of the pooled counts where that is wider; the Wilson interval uses the effective
number of answers, since answers of one phone book hang together. A difference between two arms is taken seed by seed,
where both read the same batches and answered the same questions, and has the t interval over the seeds.
"""

from __future__ import annotations

from pathlib import Path

from experiments.common import pages
from experiments.common.intervals import t_interval
from experiments.common.pages import number, read, signed_with_error, table
from experiments.evidence.records import ARMS, STUDIES, Row, Study, bits, rows_of, share, spans, value, variants

PAGE = "evidence.md"
SHIPPED = "mamba2_n4_g5:4"
"""The trial of pretraining that became the Mamba-2 base."""
SIZES = {
    "mamba2_n4": (1, 3840),
    "mamba2_n4_g5": (5, 3840),
    "mamba2": (1, 7680),
    "mamba2_g5": (5, 7680),
    "mamba2_n16": (1, 15360),
}
"""Groups and numbers of state of the Mamba-2 candidates of pretrain.py."""
OFF_THE_PLATEAU = 0.6
"""Recall of two pairs that guessing between the two stored numbers (.5) does not reach."""
RECIPE_TAG = "t3k1 mix"
"""The mixture of the sweep nearest to the one that the demo took."""
TASKS = {
    "phonebook": "two letters, {}",
    "one_letter": "one letter, {}",
    "passkey": "key at {}",
    "bits_per_byte": "bits {}",
}
"""Head of a column of differences, per task."""
COLUMNS = {
    "mamba2": (
        *(("phonebook", pairs) for pairs in ("8", "16", "32")),
        *(("one_letter", pairs) for pairs in ("8", "24")),
        *(("passkey", length) for length in ("1024", "2048")),
        *(("bits_per_byte", span) for span in ("256–512", "8k–16k")),
    ),
    "gla": (
        *(("phonebook", pairs) for pairs in ("8", "16", "32", "64")),
        *(("passkey", length) for length in ("512", "2048")),
        *(("bits_per_byte", span) for span in ("256–512", "8k–16k")),
    ),
}
"""The cells that the tables of differences show: (task, cell)."""


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


def differences(name: str, study: Study, rows: list[Row], others: list[Row]) -> list[str]:
    """`rows` minus `others`, model by model, in every cell of COLUMNS: mean ± half the t interval."""
    pairs = list(zip(rows, others, strict=True))
    return [
        signed_with_error(*t_interval([value(study, a, *column) - value(study, b, *column) for a, b in pairs]))
        for column in COLUMNS[name]
    ]


def heads(name: str) -> list[str]:
    """Heads of the columns of `differences`."""
    return [TASKS[task].format(cell) for task, cell in COLUMNS[name]]


def against_plain_table(name: str, study: Study) -> str:
    """Every arm minus plain continued training, seed by seed."""
    lines = [
        [arm, label(passing), *differences(name, study, rows_of(study, arm, passing), rows_of(study, "plain", passing))]
        for passing in (False, True)
        for arm in ARMS[1:]
    ]
    return table(["arm", "passing", *heads(name)], lines)


def passing_table(name: str, study: Study) -> str:
    """What state passing changes, seed by seed."""
    lines = [
        [arm, "on − off", *differences(name, study, rows_of(study, arm, True), rows_of(study, arm, False))]
        for arm in ARMS
    ]
    return table(["arm", "passing", *heads(name)], lines)


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


def between_table(name: str, study: Study) -> str:
    """The differences between arms that the page speaks of."""
    lines = [
        [
            f"{one} − {other}",
            label(passing),
            *differences(name, study, rows_of(study, one, passing), rows_of(study, other, passing)),
        ]
        for one, other in (("perturb", "preserve"), ("perturb", "reinit"), ("reinit", "inherit"))
        for passing in (False, True)
    ]
    return table(["arms", "passing", *heads(name)], lines)


def rates_table(study: Study) -> str:
    """What each rate of the touched parameters scored in the selection; the GLA study chose with passing on alone."""
    rates = sorted({r["rate"] for r in study["selection"]})
    found = {(r["arm"], r.get("state_passing", True), r["rate"]): r["score"] for r in study["selection"]}
    lines = []
    for passing in sorted({passing for _, passing, _ in found}):
        for arm in ARMS:
            scores = [found[arm, passing, rate] for rate in rates]
            shown = [f"**{number(s)}**" if s == max(scores) else number(s) for s in scores]
            lines.append([arm, label(passing), *shown])
    return table(["arm", "passing", *(f"touched at {r:g}" for r in rates)], lines)


def sweep_table() -> str:
    """The runs of the sweep on the mixture of the demo: one seed each. `plain` had one rate, whatever its name says."""
    lines = []
    for row in read("sweep_recipes.json")["log"]:
        if row["tag"] == RECIPE_TAG:
            arm, rest, touched = row["name"].split()
            rates = f"{float(rest):g}" if arm == "plain" else f"{float(rest):g}, touched {float(touched):g}"
            shares = [number(v) for v in (*row["one"], *row["two"], row["key"][-1])]
            bits_shown = [f"{row['bpb'][i]:.3f}" for i in (1, -1)]
            lines.append([arm.removesuffix("allx4"), rates, *shares, *bits_shown])
    one, two = ([f"{word} {p}" for p in pairs] for word, pairs in (("one letter,", (4, 8, 16, 24)), ("two,", (4, 16))))
    return table(["arm", "rate", *one, *two, "key at 1024", "bits 256–512", "bits 1k–4k"], lines)


def family(row: Row) -> str:
    """What a trial of pretraining was a seed of."""
    return row["name"].split(":")[0]


def states_table() -> str:
    """The last look at every finalist of both Mamba-2 pretrainings, the smaller states first."""
    lines = []
    for file in ("pretraining_mamba2.json", "pretraining_mamba2_larger.json"):
        record = read(file)
        settings, log = record["settings"], record["log"]
        trials = [row for row in log if row["step"] == settings["trial_steps"]]
        for row in (row for row in log if row["step"] == settings["steps"]):
            alike = [r["phonebook"]["2"] > OFF_THE_PLATEAU for r in trials if family(r) == family(row)]
            groups, state = SIZES[family(row)]
            tokens = settings["steps"] * settings["batch"] * settings["length"]
            shares = [row["phonebook"][p] for p in ("8", "16", "32")] + [
                row["one_letter"][p] for p in ("8", "16", "24")
            ]
            shares += [row["passkey"][n] for n in ("1024", "2048")]
            name = f"**{row['name']}**" if row["name"] == SHIPPED else row["name"]
            facts = [f"{state:,}", str(groups), f"{tokens / 1e6:.0f}M", f"{sum(alike)} of {len(alike)}"]
            lines.append((state, [name, *facts, *map(number, shares)]))
    lines.sort(key=lambda line: line[0])
    heads = [f"{word} {p}" for word, pairs in (("two letters,", (8, 16, 32)), ("one,", (8, 16, 24))) for p in pairs]
    head = ["trial", "state", "groups", "tokens", "off the plateau", *heads, "key at 1024", "key at 2048"]
    return table(head, [line for _, line in lines])


def tables() -> dict[str, str]:
    """Every table of the page by the name in its marker: `{kind} of {study}`, `sweep`, `states`."""
    made = {"sweep": sweep_table(), "states": states_table()}
    for name, file in STUDIES.items():
        study = read(file)
        made |= {
            f"against plain of {name}": against_plain_table(name, study),
            f"rates of {name}": rates_table(study),
            f"recall of {name}": shares_table(study, "phonebook", "pairs"),
            f"passkey of {name}": shares_table(study, "passkey", "tokens"),
            f"bits of {name}": bits_table(study),
        }
    study = read(STUDIES["mamba2"])
    made["between arms of mamba2"] = between_table("mamba2", study)
    made["passing of mamba2"] = passing_table("mamba2", study)
    made["one letter of mamba2"] = shares_table(study, "one_letter", "pairs")
    return made


def draw(folder: Path) -> None:
    """Draw the figures."""
    from experiments.evidence.figures import draw

    draw(folder)


if __name__ == "__main__":
    pages.write_page(__doc__, PAGE, tables, draw)
