"""`longrecall doctor`: what is installed, what is missing and for what, and which kernels run on this machine."""

from __future__ import annotations

import argparse
import json

from longrecall.errors import UserError

HELP = "say what is installed, what is missing for what, and which kernels run on this machine"
EXAMPLE = "longrecall doctor --json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.description = (
        f"{parser.description}\nIt imports what is installed, in processes of their own, and writes nothing. The exit"
        " code is 0 when the\nbase works, whatever extra is missing, and 2 when it does not."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what there is, return the exit code; raise UserError where the base does not work."""
    from longrecall.doctor.examination import as_text, examine

    facts = examine()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    if facts["problems"]:
        raise UserError("longrecall does not work here: " + "; ".join(facts["problems"]))
    return 0
