"""`longrecall train`: post-train a checkpoint as a recipe says."""

from __future__ import annotations

import argparse
import json

from longrecall.errors import RefusedTogether, first_process

HELP = "train a checkpoint as a YAML recipe says"
EXAMPLE = "longrecall train recipes/post_train.yaml --set model.checkpoint=bigger/ --set optimizer.touched=10x"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file; docs/training.md lists every key")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe, e.g. run.steps=500 or data.sources.0.weight=2; repeatable",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the newest checkpoint in the output folder exactly"
    )
    parser.add_argument(
        "--force", action="store_true", help="begin anew and remove the run that the output folder holds"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print the plan; read no weights, write nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, print the summary (or JSON), return the exit code."""
    from longrecall.training.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
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
