"""The models of the study of state and recall: a mixer, a factor of expansion, and whether its MLP makes up for sizes.

A name is ``mixer:factor``; in ``mixer=:factor`` the MLPs are so much wider that every factor has the parameters of the
largest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EQUAL = "="
"""Behind a mixer's name: equal parameters."""


def arm_name(mixer: str, factor: int, equal: bool = False) -> str:
    """The name of a model."""
    return f"{mixer}{EQUAL if equal else ''}:{factor}"


def parts_of(name: str) -> tuple[str, int, bool]:
    """Mixer, factor (1 where the name has none) and whether its parameters were made equal."""
    mixer, _, factor = name.partition(":")
    return mixer.removesuffix(EQUAL), int(factor or 1), mixer.endswith(EQUAL)


def expanded(mixer: str, factor: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The description of a mixer with head-wise expansion by a factor; 1 = without."""
    sizes = {"num_heads": heads, "key_dim": head_dim, "value_dim": head_dim, "conv_width": 4}
    expansion = {"expansion": {"kind": "headwise", "factor": factor}} if factor > 1 else {}
    return {"type": mixer, **sizes, **expansion}


def equal_widths(factors: Sequence[int], parameters: Callable[[int, int], int], width: int) -> dict[int, int]:
    """Factor -> inner width of the MLPs with which its model has the parameters of the largest factor's.

    Args:
        factors: of expansion.
        parameters: of a model with this factor and an inner width of its MLPs.
        width: of the MLPs of the largest factor.
    """
    target, found = parameters(max(factors), width), {}
    for factor in factors:
        least = parameters(factor, width)
        each = parameters(factor, width + 1) - least
        found[factor] = width + round((target - least) / each)
    return found
