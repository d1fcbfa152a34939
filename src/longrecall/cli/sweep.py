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
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file; docs/sweep.md lists every key")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe, e.g. training.epochs=8 or tasks.0.settings.pairs=8; repeatable",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of earlier calls, train only the others")
    parser.add_argument("--force", action="store_true", help="start over and replace the rows of earlier calls")
    parser.add_argument("--retry", action="store_true", help="with --resume: train again the runs that failed")
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="train every N-th run, beginning with the I-th (from 1), into a file of its own; "
        "a last call with --resume and without --shard joins them",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the models with parameters, steps and runs; train nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the summary, or the plan, as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, print the tables (or JSON), return the exit code."""
    from longrecall.errors import UserError

    if args.retry and not args.resume:
        raise UserError("--retry goes with --resume: without it every run is trained anyway")
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
