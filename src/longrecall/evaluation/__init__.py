"""Measuring what a model recalls, and how well it predicts text by position."""

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
