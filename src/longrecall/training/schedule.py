"""What changes from step to step: the learning rate and the share of the output that has been handed over."""

from __future__ import annotations

import math

from longrecall.training.recipe import HandoverRecipe, OptimizerRecipe


def rate_factor(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Return the learning rate of 0-based `step` as a share of the peak.

    Linear warm-up whose last step is at the peak, the peak until ``hold * steps``, then cosine or linear to `minimum`.
    """
    warmup = round(recipe.warmup * steps) if recipe.warmup < 1 else int(recipe.warmup)
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, int(recipe.hold * steps))
    if step < start or recipe.schedule == "constant":
        return 1.0
    done = min(1.0, (step - start) / max(1, steps - start))
    left = 0.5 * (1 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1 - done
    return recipe.minimum + (1 - recipe.minimum) * left


def handover_progress(step: int, steps: int, recipe: HandoverRecipe) -> float:
    """Return the share of the output that the new path gives in 0-based `step`; exactly 1 from ``end * steps`` on."""
    if step >= recipe.end * steps:
        return 1.0
    return min(1.0, max(0.0, (step / steps - recipe.start) / (recipe.end - recipe.start)))
