"""How an answer in words is graded: RULER's "contains", and RESONA's score by prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from longrecall.errors import UserError

FULL_SCORE = 5.0
HIGHEST_GRADES: Mapping[str, float] = MappingProxyType({"contains": 1.0, "prefix_score": FULL_SCORE})
"""Metric -> the best grade of an answer."""


def found(needle: str, said: str) -> bool:
    """Return whether `needle` stands anywhere in `said`, in upper or lower case."""
    return needle.casefold() in said.casefold()


def contained(needles: Sequence[str], said: str) -> float:
    """Return the share of `needles` that `said` contains: RULER's score of one sample."""
    return sum(found(needle, said) for needle in needles) / len(needles)


def prefix_score(needle: str, said: str, shortest: int = 1) -> float:
    """Return 0 to 5: five times the share of `needle` that its longest prefix found anywhere in `said` makes up.

    `shortest`: a prefix of fewer characters counts nothing (almost any answer contains the first digit of a number).
    The whole needle gives 5. Upper and lower case are the same. Source: RESONA, appendix A.5.
    """
    if not needle:
        raise UserError("prefix_score: the needle is empty")
    text, wanted = said.casefold(), needle.casefold()
    # Whether a prefix is found can only change from yes to no as it grows.
    size = 0
    while size < len(wanted) and wanted[: size + 1] in text:
        size += 1
    return FULL_SCORE * size / len(wanted) if size >= min(shortest, len(wanted)) else 0.0
