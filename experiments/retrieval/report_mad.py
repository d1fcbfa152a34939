"""The tables of docs/retrieval_evidence/mad.md; report.py is the command.

A cell is a task, a mixer and whether it has retrieval: one run each, and of fuzzy recall several. The table of the
suite shows the best of them, another one all runs of fuzzy recall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common.pages import NOT_RUN, number, read, share, table, until_then
from experiments.retrieval.join_sweeps import runs_again, runs_by_key
from longrecall.report.sweeps import published_mad
from longrecall.tasks.published import RESONA_TABLE_1_COLUMNS

RECORD = "mad_baseline.json"
MIXERS = ("mamba", "mamba2", "rwkv5", "gla", "gated_delta_net")
FUZZY = "mad_fuzzy_recall"
WITHOUT, WITH = "without", "with"
Key = tuple[str, str, bool]


def best_rows() -> dict[Key, Mapping[str, Any]]:
    """The best row of each cell: (task, mixer, with retrieval)."""
    found: dict[Key, Mapping[str, Any]] = {}
    for row in read(RECORD)["rows"]:
        key = (row["task"], row["model"]["mixer"], row["model"]["retrieval"] is not None)
        if key not in found or row["accuracy"] > found[key]["accuracy"]:
            found[key] = row
    return found


def open_runs() -> dict[Key, Mapping[str, Any]]:
    """The cells whose best run was in training when the time was up."""
    return {(c["task"], c["mixer"], c["layer"] is not None): c for c in read(RECORD)["left"]["cut_off"]}


def mad_table(metric: str = "accuracy") -> str:
    """Accuracy on the six MAD tasks at their baselines, ours and the paper's where it has the mixer.

    Of runs that were cut off only the accuracy of all labels is known; another metric is of the best row that ended.
    """
    outcomes = {key: share(row[metric], 3) for key, row in best_rows().items()}
    if metric == "accuracy":
        outcomes |= {key: until_then(run, 3) for key, run in open_runs().items()}
    lines = []
    for mixer in MIXERS:
        for with_it in (False, True):
            published = published_mad(mixer, with_it) or (None,) * len(RESONA_TABLE_1_COLUMNS)
            cells = []
            for task, theirs in zip(RESONA_TABLE_1_COLUMNS, published, strict=True):
                mine = outcomes.get((task, mixer, with_it), NOT_RUN)
                cells.append(mine if theirs is None else f"{mine} / {number(theirs)}")
            lines.append([mixer, WITH if with_it else WITHOUT, *cells])
    return table(["mixer", "retrieval", *(name.removeprefix("mad_") for name in RESONA_TABLE_1_COLUMNS)], lines)


def fuzzy_runs() -> list[dict[str, Any]]:
    """Every run of fuzzy recall that was begun: its description and what is known of it, in the order of the table.

    `mixer`, `with_it`, `rate`, `decay`, `most` (epochs), `epochs`, `accuracy`, `macro` (None: not recorded), `history`,
    `ended`.
    """
    record = read(RECORD)
    known = {row["key"]: (row, True) for row in record["rows"]}
    known |= {run["key"]: (run, False) for run in record["left"].get("again", [])}
    further = {spec.key for spec in runs_again(record["calls"])}
    # A run of the sweep itself that was stopped is known by its cell.
    cells = {(c["mixer"], c["layer"] is not None): c for c in record["left"]["cut_off"] if "key" not in c}
    runs = []
    for key, spec in runs_by_key(record["calls"]).items():
        model = spec.model.description()
        cell = model["mixer"], model["retrieval"] is not None
        if spec.task != FUZZY:
            continue
        run, ended = known.get(key) or (None if key in further else cells.get(cell), False)
        if run is None:
            continue
        runs.append(
            {
                **{"mixer": cell[0], "with_it": cell[1], "rate": spec.learning_rate, "decay": spec.weight_decay},
                **{"most": spec.training["epochs"], "ended": ended},
                **{name: run[name] for name in ("epochs", "accuracy", "history")},
                "macro": run.get("macro_accuracy"),
            }
        )
    order = {mixer: place for place, mixer in enumerate(MIXERS)}
    return sorted(runs, key=lambda r: (order[r["mixer"]], r["with_it"], -r["rate"], r["decay"], r["most"]))


def fuzzy_table() -> str:
    """All runs of fuzzy recall: how long they went, their best and their last evaluation."""
    lines = []
    for run in fuzzy_runs():
        last = run["history"][-1] if run["history"] else (0, None, 0.0)
        loss = "" if last[1] is None else f"{last[1]:.2f}"
        epochs = f"{run['epochs']:.0f}" if run["ended"] else f"{number(run['epochs'], digits=1)}, cut off"
        texts = [run["mixer"], WITH if run["with_it"] else WITHOUT]
        rate = [number(run["rate"], digits=4), number(run["decay"], digits=1)]
        macro = "" if run["macro"] is None else share(run["macro"], 3)
        lines.append([*texts, *rate, epochs, share(run["accuracy"], 3), macro, share(last[2], 3), loss])
    head = ["mixer", "retrieval", "learning rate", "weight decay", "epochs", "best", "by class", "at the end"]
    head.append("training loss")
    return table(head, lines)


def tables() -> dict[str, str]:
    """The tables by the names in their markers."""
    by_class = mad_table("macro_accuracy")
    return {"mad": mad_table(), "mad by class": by_class, "fuzzy recall": fuzzy_table()}
