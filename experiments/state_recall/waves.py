"""A study of `experiment.py` seed by seed, in calls of some minutes each.

A wave trains all models of the study with `--seeds-at-once` seeds side by side and measures them. Each is a file of its
own in OUT, so that a later call begins with the first wave that has none; the report joins them. A wave that the time
would cut short is not begun: its `--train-seconds` of training, and `--spare` more to start and to measure, must fit.
Options that this command does not know go to `experiment.py`.
Usage: python -m experiments.state_recall.waves --study trend --out FOLDER --minutes 9 --seeds 8 \\
           --factors 1 2 4 8 16 --equal --corpus BOOKS --validation OTHER_BOOKS
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from experiments.state_recall import experiment


def arguments(given: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options of the waves, and those of every one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--study", choices=("trend", "ablation"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder; waves that are in it are not run again")
    parser.add_argument("--name", help="with which the files begin; without it state_recall_STUDY")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--seeds", type=int, default=8, help="in all")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds-at-once", type=int, default=1)
    parser.add_argument("--train-seconds", type=float, default=390.0, help="of training, in each wave")
    parser.add_argument("--spare", type=float, default=120.0, help="seconds to start and to measure")
    return parser.parse_known_args(given)


def wave_file(args: argparse.Namespace, seed: int) -> Path:
    """The file of the wave that begins with this seed."""
    path: Path = args.out / f"{args.name or f'state_recall_{args.study}'}_seed{seed}.json"
    return path


def main(given: list[str] | None = None) -> None:
    """Run the waves that fit into the time of this call."""
    began, (args, further) = time.time(), arguments(given)
    args.out.mkdir(parents=True, exist_ok=True)
    last = args.first_seed + args.seeds
    seeds = range(args.first_seed, last, args.seeds_at_once)
    for seed in seeds:
        path = wave_file(args, seed)
        if path.exists():
            continue
        left = 60 * args.minutes - (time.time() - began)
        if left < args.train_seconds + args.spare:
            break
        # The experiment writes as it measures: what a kill leaves is no whole wave.
        partial = path.with_name(f"{path.name}.partial")
        many = min(args.seeds_at_once, last - seed)
        words = ["--study", args.study, "--out", str(partial), "--first-seed", str(seed), "--seeds", str(many)]
        experiment.main([*words, "--seconds", str(args.train_seconds), *further])
        os.replace(partial, path)
        models = len(json.loads(path.read_text(encoding="utf-8"))["results"])
        print(f"{path.name}: {models} models, {time.time() - began:.0f} s", flush=True)
    done = sum(wave_file(args, seed).exists() for seed in seeds)
    print(f"{done} of {len(seeds)} waves; the same command goes on" if done < len(seeds) else "all waves are there")


if __name__ == "__main__":
    main()
