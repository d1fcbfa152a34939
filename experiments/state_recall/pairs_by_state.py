"""What a record of `single_tokens.py` says: recall by number of pairs, how many pairs a state holds, and the exponent.

A run that has learned nothing stays on the plateau of guessing; these are counted apart, and every number is of those
that left it. Intervals are bootstraps over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.intervals import bootstrap, line
from experiments.common.pages import number, share, table
from experiments.state_recall.arms import parts_of

LEFT = 0.5
"""Recall with the fewest pairs of a run that has left the plateau."""
NAMES = {"gated_delta_net": "Gated DeltaNet", "gla": "GLA"}
Row = Mapping[str, Any]
Record = Mapping[str, Any]
Groups = dict[str, list[Row]]


def recall(row: Row) -> dict[int, float]:
    """Pairs -> share recalled at the end of the training, none of them after a loss that was no number."""
    ended = row["status"] == "done"
    return {
        test["settings"]["pairs"]: test["history"][-1][1] if ended and test["history"] else 0.0 for test in row["tests"]
    }


def left_plateau(row: Row) -> bool:
    """Whether the run has learned to recall at all."""
    found = recall(row)
    return found[min(found)] >= LEFT


def held(row: Row) -> float:
    """Pairs that the model recalls of rows with ever more: the most over the numbers of pairs that were tried."""
    return max(pairs * value for pairs, value in recall(row).items())


def settled(row: Row) -> bool:
    """Whether the loss had stopped falling, or everything was recalled, before the last epoch that was allowed."""
    return bool(row["status"] == "done" and row["epochs"] < row["most_epochs"])


def groups_of(record: Record) -> Groups:
    """Name of the model -> its runs that ended, by seed; one whose loss was no number any more has ended too."""
    most = record["recipe"]["training"]["epochs"]
    found: Groups = {}
    for row in sorted(record["rows"], key=lambda row: int(row["seed"])):
        if row["status"] in ("done", "diverged"):
            found.setdefault(row["model"]["mixer"], []).append({**row, "most_epochs": most})
    return found


def arms_of(record: Record) -> dict[tuple[str, bool], Groups]:
    """(Mixer, equal parameters) -> its models by factor; the largest factor of the study belongs to both arms."""
    groups, found = groups_of(record), dict[tuple[str, bool], Groups]()
    planned = [parts_of(mixer["label"]) for mixer in record["recipe"]["models"]["mixers"]]
    for equal in (False, True):
        for name in sorted(groups, key=lambda name: parts_of(name)[1]):
            mixer, factor, of_equal = parts_of(name)
            largest = factor == max(other for of, other, _ in planned if of == mixer)
            if of_equal == equal or (equal and largest):
                found.setdefault((mixer, equal), {})[name] = groups[name]
    return found


def exponent(groups: Sequence[Sequence[Row]]) -> float | None:
    """Slope of the logarithm of the pairs held by that of the state: 1 = in proportion; of runs off the plateau."""
    runs = [row for group in groups for row in group if left_plateau(row)]
    fitted = line([math.log2(row["state_size"]) for row in runs], [math.log2(held(row)) for row in runs])
    return None if fitted is None else fitted.slope


def mean_held(groups: Sequence[Sequence[Row]]) -> float | None:
    """Mean of the pairs held, of runs off the plateau."""
    values = [held(row) for group in groups for row in group if left_plateau(row)]
    return statistics.mean(values) if values else None


def arms_table(record: Record) -> str:
    """Every model: sizes, how many seeds left the plateau and settled, the pairs held, and recall by pairs."""
    lines, pairs = [], sorted({pairs for row in record["rows"] for pairs in recall(row)})
    for (mixer, equal), models in arms_of(record).items():
        for name, rows in models.items():
            off = [row for row in rows if left_plateau(row)]
            mean, interval = mean_held([rows]), bootstrap([rows], mean_held)
            cells = [NAMES.get(mixer, mixer), "equal" if equal else "plain", str(parts_of(name)[1])]
            cells += [f"{rows[0]['state_size']:,}", f"{rows[0]['parameters']:,}", f"{len(off)} of {len(rows)}"]
            cells += [str(sum(map(settled, rows))), shown(mean, interval, 1)]
            shares = [share(statistics.mean(recall(row)[n] for row in off), 2) if off else "" for n in pairs]
            lines.append([*cells, *shares])
    heads = ["model", "parameters are", "E", "state", "parameters", "left the plateau", "settled", "pairs held"]
    return table([*heads, *(f"{n} pairs" for n in pairs)], lines, texts=2)


def exponents_table(record: Record) -> str:
    """The exponent of each arm, and how many times the pairs the largest factor holds."""
    lines = []
    for (mixer, equal), models in arms_of(record).items():
        groups = list(models.values())
        ratio = [groups[0], groups[-1]] if len(groups) > 1 else []
        cells = [NAMES.get(mixer, mixer), "equal" if equal else "plain"]
        cells.append(str(sum(left_plateau(row) for group in groups for row in group)))
        cells.append(shown(exponent(groups), bootstrap(groups, exponent), 2))
        cells.append(shown(times(ratio), bootstrap(ratio, times), 2))
        lines.append(cells)
    heads = ["model", "parameters are", "runs off the plateau", "exponent", "largest E / smallest, pairs held"]
    return table(heads, lines, texts=2)


def times(groups: Sequence[Sequence[Row]]) -> float | None:
    """The mean pairs held of the last group over that of the first."""
    if len(groups) < 2:
        return None
    first, last = mean_held(groups[:1]), mean_held(groups[-1:])
    return None if not first or last is None else last / first


def shown(value: float | None, interval: tuple[float, float] | None, digits: int) -> str:
    """A number with its interval, as far as they are known."""
    if value is None:
        return ""
    if interval is None:
        return number(value, digits=digits)
    low, high = (number(end, digits=digits) for end in interval)
    return f"{number(value, digits=digits)} ({low} to {high})"


def tables(record: Record) -> dict[str, str]:
    """The tables by their names."""
    return {"pairs by state": arms_table(record), "exponents of pairs": exponents_table(record)}


def as_text(record: Record) -> str:
    """All tables, each under its name."""
    return "\n".join(f"{name}\n\n{text}" for name, text in tables(record).items())


def summary(record: Record) -> dict[str, Any]:
    """The same as numbers."""
    models, found = groups_of(record), []
    for name, rows in models.items():
        mixer, factor, equal = parts_of(name)
        found.append(
            {
                **{"mixer": mixer, "factor": factor, "equal_parameters": equal},
                **{"state_size": rows[0]["state_size"], "parameters": rows[0]["parameters"]},
                **{"seeds": len(rows), "left_plateau": sum(map(left_plateau, rows))},
                **{"settled": sum(map(settled, rows)), "pairs_held": [round(held(row), 3) for row in rows]},
                "recall": [recall(row) for row in rows],
            }
        )
    lines = [
        {
            **{"mixer": mixer, "equal_parameters": equal, "exponent": exponent(list(groups.values()))},
            "interval": bootstrap(list(groups.values()), exponent),
        }
        for (mixer, equal), groups in arms_of(record).items()
    ]
    return {"complete": record["complete"], "runs": record["runs"], "models": found, "exponents": lines}
