"""Measuring what a model recalls, and how well it predicts text by position.

What reads and compares result files needs no model, so each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrecall.late_names import late_names

if TYPE_CHECKING:
    from longrecall.evaluation.checkpoint import evaluate_checkpoint
    from longrecall.evaluation.comparison import compare_files
    from longrecall.evaluation.engine import evaluate
    from longrecall.evaluation.results import capacity, check_result, read_result, summarise
    from longrecall.evaluation.statistics import (
        bootstrap_mean_interval,
        bootstrap_ratio_interval,
        clustered_wilson_interval,
        wilson_interval,
    )

__all__ = [
    "bootstrap_mean_interval",
    "bootstrap_ratio_interval",
    "capacity",
    "check_result",
    "clustered_wilson_interval",
    "compare_files",
    "evaluate",
    "evaluate_checkpoint",
    "read_result",
    "summarise",
    "wilson_interval",
]

_MODULES = {
    "checkpoint": ("evaluate_checkpoint",),
    "comparison": ("compare_files",),
    "engine": ("evaluate",),
    "results": ("capacity", "check_result", "read_result", "summarise"),
    "statistics": (
        "bootstrap_mean_interval",
        "bootstrap_ratio_interval",
        "clustered_wilson_interval",
        "wilson_interval",
    ),
}

__getattr__ = late_names(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
