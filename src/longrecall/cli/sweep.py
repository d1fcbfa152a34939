"""`longrecall sweep`: train grids of small models on synthetic tasks."""

from __future__ import annotations

import argparse
import json

HELP = "train a grid of small models on synthetic tasks, many at once on one GPU"
EXAMPLE = (
    "longrecall sweep recipes/sweeps/mqar_smoke.yaml --dry-run\n"
    "  longrecall sweep recipes/sweeps/mqar_table11.yaml --set run.parallel=24 --shard 1/2 --resume"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file; docs/reference/recipes.md lists every key")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe, e.g. training.epochs=8 or tasks.0.settings.pairs=8; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the results of earlier calls and train only what is missing"
    )
    parser.add_argument("--force", action="store_true", help="delete the results of earlier calls and start again")
    parser.add_argument("--retry", action="store_true", help="with --resume: train the failed runs again")
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="train part I of N of the runs, into a separate file. A last call with --resume and without --shard joins "
        "the parts",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the models with parameters, steps and runs; train nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the summary, or the plan, as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, print the tables (or JSON), return the exit code."""
    from longrecall.errors import UserError

    if args.retry and not args.resume:
        raise UserError("--retry needs --resume; without --resume every run is trained anyway")
    from longrecall.files import check_no_input
    from longrecall.sweep.grid import parse_shard, runs_of, shard
    from longrecall.sweep.recipe import SweepRecipe

    chosen = None if args.shard is None else parse_shard(args.shard)
    recipe = SweepRecipe.load(args.recipe, args.overrides)
    check_no_input(recipe.run.output, [args.recipe], "choose another run.output")
    if args.dry_run:
        from longrecall.sweep.summary import plan, plan_lines

        runs = runs_of(recipe)
        runs = runs if chosen is None else shard(runs, *chosen)
        entries = plan(runs)
        if args.json:
            print(json.dumps({"output": recipe.run.output, "runs": len(runs), "plan": entries}, indent=2))
        else:
            print("\n".join([*plan_lines(entries), "", f"{len(runs)} runs; dry run: nothing was trained or written"]))
        return 0
    from longrecall.sweep.run import run_sweep

    summary = run_sweep(
        recipe,
        resume=args.resume,
        retry=args.retry,
        force=args.force,
        shard_of=chosen,
        show_progress=not args.json,
    )
    print(json.dumps(summary.to_dict(), indent=2) if args.json else "\n".join(summary.lines()))
    return 0
