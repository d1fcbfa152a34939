"""`longrecall compare`: two result files, example by example."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError
from longrecall.tables import aligned
from longrecall.units import format_length

HELP = "test whether one checkpoint recalls more than another, from their result files"
EXAMPLE = "longrecall compare before.json after.json --tasks phonebook,passkey"
_PLACES = ("length", "distance", "start", "end")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("first", metavar="A.json", help="a result file, written by longrecall eval --out")
    parser.add_argument(
        "second", metavar="B.json", help="another result file with the same tasks, options, seed and samples"
    )
    parser.add_argument("--tasks", metavar="T,...", help="compare only these tasks [all that both files hold]")
    parser.add_argument("--metrics", metavar="M,...", help="compare only these metrics [the first metric of each task]")
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.05,
        metavar="X",
        help="accepted chance that any verdict is wrong, over all cells together [%(default)s]",
    )
    parser.add_argument("--out", metavar="FILE", help="write the comparison as JSON")
    parser.add_argument("--force", action="store_true", help="replace FILE when it exists")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Compare, print a table or JSON, return the exit code."""
    tasks, metrics = _names(args.tasks, "--tasks"), _names(args.metrics, "--metrics")

    from longrecall.evaluation.comparison import compare_files
    from longrecall.files import check_no_input, write_json
    from longrecall.outputs import claim_file

    check_no_input(args.out, (args.first, args.second))
    with claim_file(args.out, force=args.force):
        comparison = compare_files(args.first, args.second, tasks=tasks, metrics=metrics, alpha=args.alpha)
        if args.out is not None:
            write_json(args.out, comparison)
    print(json.dumps(comparison, indent=1) if args.json else as_table(comparison))
    if args.out is not None:
        print(f"written to {args.out}", file=sys.stderr)
    return 0


def _names(text: str | None, option: str) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise UserError(f"{option}: there is an empty entry in {text!r}")
    return names


def as_table(comparison: Mapping[str, Any]) -> str:
    """Return a comparison as aligned lines: a row per cell, then how it was tested and what was left out."""
    rows = [("task", "cell", "metric", "A", "B", "B - A", "95% interval", "pairs", "up/down", "p", "Holm", "verdict")]
    rows += [
        (
            result["task"],
            ", ".join(f"{key} {_place(key, value)}" for key, value in result["cell"].items()),
            result["metric"],
            f"{result['first']:.3f}",
            f"{result['second']:.3f}",
            f"{result['difference']:+.3f}",
            "" if result["low"] is None else f"{result['low']:+.3f} .. {result['high']:+.3f}",
            str(result["units"]),
            f"{result['gained']}/{result['lost']}",
            _chance(result["p"]),
            _chance(result["adjusted"]),
            result["verdict"],
        )
        for result in comparison["results"]
    ]
    rule = tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True))
    heads = [f"{letter}: {comparison[which]['file']}" for letter, which in (("A", "first"), ("B", "second"))]
    return "\n".join([*heads, "", *aligned([rows[0], rule, *rows[1:]], left=3), "", *_notes(comparison)])


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    settings = comparison["settings"]
    methods = "; ".join(dict.fromkeys(result["method"] for result in comparison["results"]))
    alpha = settings["alpha"]
    notes = [
        f"tests: {methods}; Holm's correction over {settings['tests']}; verdicts at {alpha:g}",
        "each interval is for its own cell, without that correction",
    ]
    prints = [comparison[which]["fingerprint"] for which in ("first", "second")]
    if prints[0] is not None and prints[0] == prints[1]:
        notes.append("both files are of the same checkpoint")
    reasons: dict[tuple[str, str, str], int] = {}
    for item in comparison["left_out"]:
        key = (item["task"], item["metric"], item["reason"])
        reasons[key] = reasons.get(key, 0) + 1
    for (task, metric, why), count in reasons.items():
        notes.append(f"left out: {task} {metric}, {count} {'cell' if count == 1 else 'cells'}: {why}")
    return notes


def _place(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return format_length(int(value)) if value and key in _PLACES else f"{value:g}"


def _chance(p: float) -> str:
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"
