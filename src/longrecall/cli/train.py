"""`longrecall train`: post-train a checkpoint as a recipe says."""

from __future__ import annotations

import argparse
import json
from typing import Any

from longrecall.checkpoint_place import local_folder
from longrecall.errors import RefusedTogether, UserError, first_process

HELP = "train a checkpoint; a YAML recipe says on what and how"
EXAMPLE = "longrecall train recipes/post_train.yaml --set model.checkpoint=bigger/ --set optimizer.touched=10x"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file; docs/reference/recipes.md lists every key")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe, e.g. run.steps=500 or data.sources.0.weight=2; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue exactly from the newest checkpoint in the output folder"
    )
    parser.add_argument("--force", action="store_true", help="delete the run in the output folder and start again")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the recipe and its data and print the plan; reads no weights, writes nothing",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="estimate memory per GPU, FLOPs and hours; needs no GPU and no data, and of the model only a config or "
        "FILE.json",
    )
    parser.add_argument("--gpus", type=int, default=None, metavar="N", help="with --plan: number of GPUs [1]")
    parser.add_argument(
        "--utilisation",
        type=float,
        default=None,
        metavar="X",
        help="with --plan: share of a GPU's peak speed that is reached [0.4]",
    )
    parser.add_argument(
        "--peak-tflops", type=float, default=None, metavar="X", help="with --plan: peak TFLOP/s of one GPU [an H200's]"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, print the summary (or JSON), return the exit code."""
    from longrecall.training.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
    if args.plan:
        return _plan(recipe, args)
    for name in ("gpus", "utilisation", "peak_tflops"):
        if getattr(args, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to --plan; torchrun --nproc-per-node sets the GPUs of a run"
            )
    local_folder(recipe.model.checkpoint)  # a wrong name is said at once, not after torch was imported
    from longrecall.training.parallel.place import leave_group
    from longrecall.training.run import run_recipe

    try:
        summary = run_recipe(recipe, resume=args.resume, dry_run=args.dry_run, force=args.force)
    except RefusedTogether:
        leave_group()
        raise
    leave_group()
    if not first_process():
        return 0
    if args.json:
        print(json.dumps(summary.to_dict(), indent=2))
        return 0
    print(summary.table())
    print("dry run: nothing was written" if args.dry_run else f"wrote {summary.checkpoint}")
    return 0


def _plan(recipe: Any, args: argparse.Namespace) -> int:
    """Print what the run would take."""
    from longrecall.training.planning import UTILISATION, Hardware, plan_run

    if args.resume or args.force or args.dry_run:
        raise UserError("--plan only estimates and trains nothing; leave out --resume, --force and --dry-run")
    gpus = 1 if args.gpus is None else args.gpus
    utilisation = UTILISATION if args.utilisation is None else args.utilisation
    found = plan_run(recipe, Hardware(gpus, args.peak_tflops, utilisation))
    print(json.dumps(found.to_dict(), indent=2) if args.json else found.table())
    return 0
