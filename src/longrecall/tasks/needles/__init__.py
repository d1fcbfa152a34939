"""RULER's eight needle tasks over public-domain or own text."""

from longrecall.tasks.needles.grading import contained, prefix_score
from longrecall.tasks.needles.task import TASKS, Needles
from longrecall.tasks.needles.training import NeedleSource

__all__ = ["TASKS", "NeedleSource", "Needles", "contained", "prefix_score"]
