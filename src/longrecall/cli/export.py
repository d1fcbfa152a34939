"""`longrecall export`: a checkpoint that the tools of others load."""

from __future__ import annotations

import argparse
import json

from longrecall.checkpoint_place import local_folder
from longrecall.cli.completion import completed

HELP = "write a checkpoint in the format of another library, which can load it without longrecall"
EXAMPLE = "longrecall export bigger/ stock/ --to transformers_mamba2 --pad-states"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    from longrecall.models.formats import FORMATS

    formats = [name for name, form in FORMATS.items() if form.stock_config is not None]
    parser.add_argument("checkpoint", metavar="CKPT", help="the checkpoint to export; it is not changed")
    parser.add_argument("output", metavar="OUT", help="the folder to write; it appears only when it is complete")
    to = parser.add_argument(
        "--to",
        metavar="FORMAT",
        help=f"{', '.join(formats)}; or auto_map, for any model: transformers loads it, with longrecall installed [the "
        "format that CKPT was read from]",
    )
    completed(to, (*formats, "auto_map"))
    parser.add_argument(
        "--pad-states",
        action="store_true",
        help="make all layers the same size: smaller states get extra channels that change no answer",
    )
    parser.add_argument(
        "--new-config",
        action="store_true",
        help="write a new config.json instead of adapting the one of the original checkpoint",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the sizes and the cost of padding; write nothing")
    parser.add_argument("--force", action="store_true", help="replace OUT when it exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Export, print the table (or JSON), return the exit code."""
    local_folder(args.checkpoint)  # a wrong name is said at once, not after torch was imported
    from longrecall.export.exporting import export_checkpoint

    summary = export_checkpoint(
        args.checkpoint,
        args.output,
        args.to,
        pad_states=args.pad_states,
        new_config=args.new_config,
        dry_run=args.dry_run,
        force=args.force,
    )
    if args.json:
        print(json.dumps(summary.to_dict(), indent=2))
        return 0
    print(summary.table())
    print("dry run: nothing was written" if args.dry_run else f"wrote {args.output}")
    return 0
