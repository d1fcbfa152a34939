"""`longrecall doctor`: what is installed, what is missing and for what, and which kernels run on this machine."""

from __future__ import annotations

import argparse
import json
import sys

from longrecall.errors import UserError

HELP = "say which packages are installed, what the missing ones are needed for, and which kernels run here"
EXAMPLE = "longrecall doctor --json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.description = (
        f"{parser.description}\nEach package is imported in a separate process. Nothing is written.\nThe exit code is 0"
        " when the required packages work, even if optional ones are missing, and 2 otherwise."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what there is, return the exit code; raise UserError where the base does not work."""
    from longrecall.doctor.examination import as_text, examine

    if sys.stderr.isatty() and not args.json:
        print("looking at packages, kernels and folders: ten seconds or so", file=sys.stderr)
    facts = examine()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    if facts["problems"]:
        raise UserError("longrecall does not work here: " + "; ".join(facts["problems"]))
    return 0
