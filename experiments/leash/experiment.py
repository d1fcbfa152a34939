"""What a leash keeps of the demo's model: its recipe with the leash of each arm, measured as the demo measures.

Every arm trains the enlarged base on the same batches. Recall among 24 pairs is what is to be gained; bits per byte of
unseen text and pass keys are what is to be kept. A run that the file has already is not repeated, so that arms and
seeds can be added later. CPU, three minutes a run on one core.
Usage: python -m experiments.leash.experiment --arms none text:4 text+passkey:8 --seeds 0 1 2 --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

from experiments.common.command import provenance
from experiments.leash.records import all_rows, calls
from longrecall.evaluation.checkpoint import evaluate_checkpoint
from longrecall.files import write_json
from longrecall.surgery.expansion import expand
from longrecall.tasks.text import read_text
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe

ASSETS = Path(str(resources.files("longrecall") / "assets"))
BASE = ASSETS / "mamba2-base"
PAIRS = (1, 8, 24)
WINDOW = 4096
KEY_LENGTHS = (512, 1024)
DEPTHS = (0.0, 0.5, 1.0)
_OPTIONS = {"h": "hidden", "t": "temperature", "k": "top_k", "l": "length"}
"""Letters of an arm's options after its weight."""


def leash_of(arm: str) -> dict[str, Any] | None:
    """The recipe's section for an arm: ``none``, or ``SOURCES:WEIGHT`` and options, as in ``text+passkey:4:h1``.

    What follows an ``@`` are other keys of the recipe.
    """
    arm = arm.partition("@")[0]
    if arm == "none":
        return None
    names, weight, *options = arm.split(":")
    leash: dict[str, Any] = {"sources": names.split("+"), "weight": float(weight)}
    for option in options:
        if option == "instead":
            leash["instead"] = True
            continue
        value = float(option[1:])
        leash[_OPTIONS[option[0]]] = int(value) if option[0] in "kl" else value
    return leash


def recipe_of(arm: str, seed: int, checkpoint: Path, output: Path, steps: int | None) -> Recipe:
    """The demo's recipe, of another seed than 0 with other batches, with the leash of an arm."""
    settings = [
        f"model.checkpoint={checkpoint}",
        f"data.sources.0.path={ASSETS / 'text' / 'train.txt'}",
        f"data.seed={seed}",
        f"run.seed={seed}",
        f"run.output={output}",
        "run.report_to=none",
        *filter(None, arm.partition("@")[2].split(",")),
        "leash=none",
    ]
    leash = leash_of(arm)
    if leash is not None:
        settings[-1] = f"leash={json.dumps({'teacher': str(BASE), **leash})}"
    if steps is not None:
        settings.append(f"run.steps={steps}")
    return Recipe.load(ASSETS / "demo" / "recipe.yaml", settings)


def measured(checkpoint: Path, samples: int, keys: int, windows: int) -> dict[str, Any]:
    """Cell -> value, its 95% interval and count: recall by pairs, bits per byte by position, pass keys by length."""
    held_out = read_text(str(ASSETS / "text" / "held_out.txt"))
    options = {"phonebook": {"pairs": PAIRS, "letters": 1, "digits": 1}, "bits_per_byte": {"windows": windows}}
    tasks = ["phonebook", "bits_per_byte"]
    lengths = (512, WINDOW)
    result = evaluate_checkpoint(checkpoint, tasks, lengths, samples, dtype="float32", text=held_out, options=options)
    found: dict[str, Any] = {}
    for cell in result["results"]:
        if cell["metric"] == "accuracy":
            found[f"pairs:{cell['cell']['pairs']}"] = [cell["value"], cell["low"], cell["high"], cell["count"]]
        elif cell["metric"] == "bits_per_byte":
            name = f"bits:{cell['cell']['start']}-{cell['cell']['end']}"
            found[name] = [cell["value"], cell["low"], cell["high"], cell["count"]]
    depths = {"passkey": {"depths": DEPTHS}}
    result = evaluate_checkpoint(checkpoint, ["passkey"], KEY_LENGTHS, keys, dtype="float32", options=depths)
    for cell in result["results"]:
        name = f"keys:{cell['cell']['length']}:{cell['cell']['depth']}"
        found[name] = [cell["value"], cell["low"], cell["high"], cell["count"]]
    return found


def run_of(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the file: the base itself, or an arm trained and measured."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        checkpoint, logged = BASE, {}
        if arm != "base":
            expand(BASE, place / "larger", method="grow_state", layers="all", init="perturb", seed=seed)
            summary = run_recipe(recipe_of(arm, seed, place / "larger", place / "run", args.steps), show_progress=False)
            checkpoint = Path(summary.checkpoint)
            lines = (place / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
            logged = {"training_seconds": summary.seconds, "last": json.loads(lines[-1])}
        cells = measured(checkpoint, args.samples, args.keys, args.windows)
    return {"arm": arm, "seed": seed, **logged, "cells": cells, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    """Run what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", nargs="+", required=True, help="base, none, or SOURCES:WEIGHT[:OPTION...][@KEY=VALUE,...]"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=None, help="of training; as the recipe says")
    parser.add_argument("--samples", type=int, default=1024, help="answers of a phone book's size")
    parser.add_argument("--keys", type=int, default=128, help="pass keys of a length and depth")
    parser.add_argument("--windows", type=int, default=16, help="excerpts of unseen text")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = {key: value for key, value in vars(args).items() if key not in ("arms", "seeds")}
    # This call's own machine and versions: the file may have runs of others.
    call = provenance(settings) | {"results": []}
    earlier = calls(json.loads(args.out.read_text(encoding="utf-8"))) if args.out.exists() else []
    known = {(row["arm"], row["seed"]) for row in all_rows({"calls": earlier})}
    for seed in args.seeds:
        for arm in args.arms:
            own = 0 if arm == "base" else seed
            if (arm, own) not in known:
                call["results"].append(run_of(arm, own, args))
                known.add((arm, own))
                write_json(args.out, {"calls": [*earlier, call]})


if __name__ == "__main__":
    main()
