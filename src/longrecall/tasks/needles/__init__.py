"""RULER's eight needle tasks over public-domain or own text."""

from longrecall.tasks.needles.grading import contained, prefix_score
from longrecall.tasks.needles.task import TASKS, Needles
from longrecall.tasks.needles.wording import KINDS

ESSAYS = tuple(name for name, kind in KINDS.items() if kind.haystack == "essay")
"""The tasks that hide their needles in a text, which can be the user's own."""

__all__ = ["ESSAYS", "TASKS", "Needles", "contained", "prefix_score"]
