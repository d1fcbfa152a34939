"""Result entries of answers that can be partly right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.evaluation.outcomes import pack_scores
from longrecall.evaluation.statistics import Interval, wilson_interval
from longrecall.tasks.encoding import Cell, QuestionSample
from longrecall.tasks.registry import GradedTask


def bounded_mean_interval(mean: float, highest: float, count: int) -> Interval:
    """Return an interval (at least 95%) of the mean of `count` independent scores between 0 and `highest`.

    Wilson's, of the share `mean` / `highest`: no score in [0, 1] varies more than one that is 0 or 1 with that mean, so
    the interval is never too narrow. Unlike a bootstrap it keeps its width where all scores are equal.
    """
    low, high = wilson_interval(mean / highest * count, count)
    return low * highest, high * highest


def grade_entries(
    task: GradedTask,
    cell: Cell,
    samples: Sequence[QuestionSample],
    said: Sequence[str],
    finite: NDArray[np.bool_],
) -> list[dict[str, Any]]:
    """Return one result entry per grade of a cell, from all its samples and what the model said after each.

    `said` [samples]: texts; `finite` bool [samples]: false where a logit was NaN or infinite, which grades 0 in
    everything.
    """
    graded = [task.grades(cell, sample, text) for sample, text in zip(samples, said, strict=True)]
    entries = []
    for metric, highest in task.highest_grades.items():
        scores = np.array([grades[metric] for grades in graded]) * finite
        mean = float(scores.mean())
        low, high = bounded_mean_interval(mean, highest, len(scores))
        entry = {
            "task": task.name,
            "cell": dict(cell),
            "metric": metric,
            "value": mean,
            "count": len(scores),
            "low": min(low, mean),
            "high": max(high, mean),
            "sequences": len(scores),
            "diverged": int((~finite).sum()),
        }
        entries.append(entry | {"outcomes": pack_scores(scores)})
    return entries


def mean_fill(samples: Sequence[Any]) -> dict[str, float]:
    """Return ``{"fill": share}`` of samples that know how full they are, and nothing for others."""
    fills = [sample.fill for sample in samples if hasattr(sample, "fill")]
    return {"fill": round(float(np.mean(fills)), 6)} if fills else {}
