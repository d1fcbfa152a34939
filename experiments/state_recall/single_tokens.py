"""Recall by number of pairs and by state size, with values of one token and many seeds.

Gated DeltaNet and GLA with head-wise expansion by 1 to 16, and each once more with MLPs that make the parameters equal,
learn multi-query associative recall from nothing: rows of 4 to 256 pairs, all asked for, until the training loss no
longer falls. A call trains for `--minutes`, and the next one goes on: every run that has ended is a row of
OUT/single_tokens.json. At the end the tables of `pairs_by_state.py` are printed, and OUT/single_tokens_summary.json
is written.
Usage: python -m experiments.state_recall.single_tokens --out FOLDER --minutes 8.5
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from experiments.state_recall.arms import arm_name, equal_widths, expanded
from experiments.state_recall.pairs_by_state import as_text, summary
from longrecall.models.accounting import account
from longrecall.models.config import RecurrentConfig
from longrecall.sweep.journal import Journal
from longrecall.sweep.recipe import SweepRecipe
from longrecall.sweep.run import run_sweep

FILE = "single_tokens.json"
SUMMARY = "single_tokens_summary.json"
AT_ONCE = 4
"""Seeds that are trained together, before the next ones: what there is when time is up has all arms."""
TOKENS_A_PAIR = 4
"""Key and value, and then every key with room for its answer."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--tiny` shrinks everything to seconds on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; what is in it is gone on with")
    parser.add_argument("--minutes", type=float, default=8.5, help="of this call")
    parser.add_argument("--checkpoints", type=Path, help="a folder for what the time stops; else it begins anew")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test: nothing is learned")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--mixers", nargs="+", default=("gated_delta_net", "gla"))
    parser.add_argument("--factors", type=int, nargs="+", default=(1, 2, 4, 8, 16))
    parser.add_argument("--train-pairs", type=int, nargs="+", default=(4, 16, 64, 256))
    parser.add_argument("--test-pairs", type=int, nargs="+", default=(4, 8, 16, 32, 64, 128, 256))
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=128, help="inner width, of the largest factor with equal parameters")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch, for each number of pairs")
    parser.add_argument("--epochs", type=int, default=40, help="at most")
    parser.add_argument("--patience", type=int, default=4, help="epochs without a lower loss")
    parser.add_argument("--test-queries", type=int, default=8192, help="for each number of pairs")
    parser.add_argument("--parallel", type=int, default=14)
    parser.add_argument("--processes", type=int, default=7)
    args = parser.parse_args(given)
    if args.tiny:
        small = {"mixers": ("gla",), "factors": (1, 2), "train_pairs": (1, 2), "test_pairs": (1, 2, 4)}
        small |= {"vocabulary": 16, "width": 8, "head_dim": 4, "layers": 1, "mlp": 8, "tokens": 64, "steps": 2}
        vars(args).update(small | {"epochs": 2, "test_queries": 16, "parallel": 1, "processes": 1})
    return args


def mixers_of(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The mixers of all arms, and the inner width of the MLPs of each."""
    mixers, widths = [], {}
    for mixer in args.mixers:

        def parameters(factor: int, mlp: int, mixer: str = mixer) -> int:
            layer = {"mixer": expanded(mixer, factor, args.heads, args.head_dim), "mlp_size": mlp}
            sizes = {"vocab_size": args.vocabulary, "hidden_size": args.width, "layers": [layer] * args.layers}
            return account(RecurrentConfig(**sizes)).parameters

        equal = equal_widths(args.factors, parameters, args.mlp)
        for factor in args.factors:
            described = expanded(mixer, factor, args.heads, args.head_dim)
            arms = {arm_name(mixer, factor): args.mlp}
            if factor != max(args.factors):  # the largest is the same in both arms
                arms[arm_name(mixer, factor, equal=True)] = equal[factor]
            mixers += [{**described, "label": name} for name in arms]
            widths |= arms
    return mixers, widths


def recipe_of(args: argparse.Namespace, seeds: int, seconds: float) -> SweepRecipe:
    """The sweep of the first `seeds` seeds."""
    lengths = {pairs: TOKENS_A_PAIR * pairs for pairs in sorted({*args.train_pairs, *args.test_pairs})}
    batches = {length: max(1, args.tokens // length) for length in lengths.values()}
    mixers, widths = mixers_of(args)
    train = [{"length": lengths[n], "pairs": n, "rows": args.steps * batches[lengths[n]]} for n in args.train_pairs]
    test = [{"length": lengths[n], "pairs": n, "rows": max(1, args.test_queries // n)} for n in args.test_pairs]
    least = 1 / min(args.test_pairs) / len(args.test_pairs)
    return SweepRecipe.from_dict(
        {
            "tasks": [{"name": "mqar", "settings": {"vocab_size": args.vocabulary}, "train": train, "test": test}],
            "models": {"mixers": mixers, "hidden_sizes": args.width, "layers": args.layers, "mlp": widths},
            "training": {
                **{"epochs": args.epochs, "learning_rates": [args.learning_rate], "seeds": list(range(seeds))},
                **{"batch_size": batches, "schedule": "constant", "warmup": 100.0, "clip": 1.0, "betas": [0.9, 0.95]},
                **{"decayed": "matrices", "stop_at": 0.999, "patience": args.patience},
                # Guessing among the values of a row has 1/4 with the fewest pairs; twice all that guessing may come to.
                "patience_from": min(0.9, 4 * least),
            },
            "run": {
                **{"output": str(args.out / FILE), "parallel": args.parallel, "processes": args.processes},
                **{"matmul_precision": "high", "budget": max(1.0, seconds)},
                "checkpoints": None if args.checkpoints is None else str(args.checkpoints),
            },
        }
    )


def main(given: list[str] | None = None) -> None:
    """Train for the time of the call, then print and write what there is by now."""
    began, args = time.time(), arguments(given)
    args.out.mkdir(parents=True, exist_ok=True)
    known = Journal(args.out / FILE, None, resume=True).done.values()
    first = max((int(row["seed"]) + 1 for row in known), default=0)
    for seeds in [*(n for n in range(AT_ONCE, args.seeds, AT_ONCE) if n >= first), args.seeds]:
        left = 60 * args.minutes - (time.time() - began)
        if left < 1 and (args.out / FILE).exists():
            break
        found = run_sweep(recipe_of(args, seeds, left), resume=True)
        seconds = time.time() - began
        print(f"{len(found.rows)} of {found.runs} runs with {seeds} seeds after {seconds:.0f} s", flush=True)
    record = json.loads((args.out / FILE).read_text(encoding="utf-8"))
    (args.out / SUMMARY).write_text(json.dumps(summary(record), indent=1), encoding="utf-8")
    print(as_text(record), flush=True)


if __name__ == "__main__":
    main()
