"""`longrecall consolidate`: a checkpoint out of a saved step of a run."""

from __future__ import annotations

import argparse
import json

HELP = "turn a saved step of a training run into a checkpoint, also a step that several GPUs wrote in parts"
EXAMPLE = "longrecall consolidate runs/post_train --to trained/"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument(
        "source",
        metavar="RUN",
        help="a run's output folder, of which the newest complete step is taken; or one of its steps/step-... folders",
    )
    parser.add_argument(
        "--to", required=True, metavar="OUT", help="the folder to write; it appears only when it is complete"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, print a few lines (or JSON), return the exit code."""
    from longrecall.training.checkpoints import consolidate

    summary = consolidate(args.source, args.to, force=args.force)
    if args.json:
        print(json.dumps(summary.to_dict(), indent=2))
        return 0
    print(summary.table())
    print(f"wrote {args.to}")
    return 0
