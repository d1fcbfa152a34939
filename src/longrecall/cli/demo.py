"""`longrecall demo`: the whole job on a small pretrained model that ships with the package."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "run every step on a small model that ships with the package: measure, enlarge, train, measure again, report"
EXAMPLE = "longrecall demo --out runs/demo"
_COST = """It takes about five minutes on two CPU cores and a few megabytes of disk. It needs no GPU and no network.
The numbers differ a little from machine to machine. A finished demo is not overwritten; --force replaces it."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.description = f"{parser.description}\n{_COST}"
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="output folder [%(default)s]")
    add(
        "--steps",
        type=int,
        metavar="N",
        help="training steps of each of the two runs; fewer are quicker and show less [480]",
    )
    add(
        "--samples",
        type=int,
        default=1024,
        metavar="N",
        help="answers per length of the list, before and after [%(default)s]",
    )
    add("--force", action="store_true", help="delete what DIR holds, such as a finished demo, and start again")
    add("--json", action="store_true", help="print the paths of the files and the results as JSON, not a table")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when it came to its end, whatever it showed."""
    from longrecall.demo.job import demo_facts, run_demo

    table = run_demo(args.out, steps=args.steps, samples=args.samples, force=args.force)
    print(json.dumps(demo_facts(args.out), indent=2) if args.json else table)
    return 0
