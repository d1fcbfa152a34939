"""What it would cost to settle a claim: hours on one NVIDIA H200, from recipes, descriptions and recorded speeds.

A training is priced by its FLOPs (`longrecall train --plan`) at the share of the peak that a recorded step of the 400M
Gated DeltaNet reaches. That share is known for one model alone, so a price may be wrong by a factor of two. Runs of a
sweep are priced by their recorded seconds an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from experiments.common.pages import ROOT, read
from experiments.papers.records import bench
from experiments.retrieval import report_selector
from longrecall.training.planning import H200_TFLOPS, Hardware, plan_run
from longrecall.training.recipe import Recipe

RECIPES = ROOT / "recipes"
PEAK = H200_TFLOPS["bf16"] * 1e12
AT_ONCE = 6
"""Small models that train beside each other on one GPU, the fewest of the recorded sweeps."""
LEFT = {"paper's selector": report_selector.hours_left}
"""What is left of a sweep, by the key `left` of a claim: hours."""
SMALL = "under 1"
"""The price of an evaluation, a benchmark or a small study."""


@functools.cache
def training_flops(recipe: str, config: str, tokens: float | None = None) -> tuple[float, float]:
    """FLOPs of a token and of the whole run of a recipe of the papers with a model of recipes/configs."""
    changes = [f"model.checkpoint={RECIPES / 'configs' / config}.json"]
    loaded = Recipe.load(RECIPES / "papers" / f"{recipe}.yaml", changes)
    if loaded.parallel.shard not in (None, 1):
        loaded = Recipe.load(RECIPES / "papers" / f"{recipe}.yaml", [*changes, "parallel.shard=1"])
    plan = plan_run(loaded, Hardware())
    of_token = float(sum(plan.flops_per_token.values()))
    # The recipes are for 8 GPUs: of a recipe that counts steps, one GPU's plan has an eighth of the tokens.
    whole = plan.tokens if loaded.run.tokens is not None else 8 * plan.tokens
    return of_token, of_token * (tokens or whole)


def utilisation() -> float:
    """Share of the peak in the recorded training step."""
    speed = bench("gpu_training")["gated_delta_net_400m: step, loss alone"]["tokens_per_second"]
    return float(speed) * training_flops("scaling_400m", "gated_delta_net_400m")[0] / PEAK


def hours_of(run: str) -> float:
    """Hours of `RECIPE CONFIG [tokens=N] [xN]`, or of `about PARAMETERS TOKENS [xN]`, 6 FLOPs a parameter and token."""
    first, second, *options = run.split()
    times = next((int(word[1:]) for word in options if word.startswith("x")), 1)
    tokens = next((float(word.removeprefix("tokens=")) for word in options if word.startswith("tokens=")), None)
    flops = 6 * float(second) * float(options[0]) if first == "about" else training_flops(first, second, tokens)[1]
    return times * flops / (utilisation() * PEAK) / 3600


def sweep_hours(file: str, task: str, runs: int, epochs: int) -> float:
    """Hours of so many runs, by the mean seconds an epoch of the recorded ones, which shared a GPU."""
    rows = [row for row in read(file)["rows"] if row["task"] == task and row.get("seconds")]
    seconds = sum(row["seconds"] for row in rows) / sum(row["epochs"] for row in rows)
    return runs * epochs * seconds / AT_ONCE / 3600


def price(entry: Mapping[str, Any]) -> str:
    """The price of an entry in hours, two digits; empty where no training or measuring would settle it."""
    if not {"seconds", "runs", "left"} & set(entry):
        return SMALL if "hours" in entry else ""
    hours = sum(hours_of(run) for run in entry.get("runs", []))
    if "seconds" in entry:
        hours += sweep_hours(**entry["seconds"])
    if "left" in entry:
        hours += LEFT[entry["left"]]()
    return f"{float(f'{hours:.2g}'):,.0f}" if hours >= 1 else SMALL
