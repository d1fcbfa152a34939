"""RULER's eight needle tasks over public-domain or own text."""

from longrecall.tasks.needles.grading import contained, prefix_score
from longrecall.tasks.needles.task import TASKS, Needles

__all__ = ["TASKS", "Needles", "contained", "prefix_score"]
