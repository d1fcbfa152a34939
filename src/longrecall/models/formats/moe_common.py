"""What formats with mixtures of experts share: how experts are stored, and the weight of their balance loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.sources import either, join, numbered, same, split

NAMES = ("gate_proj", "up_proj", "down_proj")


def expert_sources(
    ours: str, theirs: str, experts: int, inner: int, names: Sequence[str] = NAMES, together_in: str | None = None
) -> dict[str, Source]:
    """Return the sources of gated experts: one tensor each in published files, or all in one as transformers has them.

    Args:
        ours, theirs: what stands before ``experts.`` on both sides.
        experts: how many there are.
        inner: the width of one.
        names: how files call the gate, the other inner projection and the last one of an expert.
        together_in: what stands before ``experts.`` where all are in one tensor; None = `theirs`.
    """
    fused = theirs if together_in is None else together_in
    gate, up, down = (same(f"{theirs}experts.{{}}.{name}.weight") for name in names)
    together = numbered(join((gate, up), (inner, inner)), experts)
    return {
        f"{ours}experts.gate_up_proj": either(together, same(f"{fused}experts.gate_up_proj")),
        f"{ours}experts.down_proj": either(numbered(down, experts), same(f"{fused}experts.down_proj")),
    }


def mlp_sources(ours: str, theirs: str, *other_spellings: str) -> dict[str, Source]:
    """Return the sources of a gated MLP whose projections have the same names on both sides."""
    places = (theirs, *other_spellings)
    return {f"{ours}{name}.weight": same(*(f"{place}{name}.weight" for place in places)) for name in NAMES}


def fused_mlp_sources(ours: str, theirs: str, inner: int, *, bias: bool = False) -> dict[str, Source]:
    """Return the sources of a gated MLP whose gate lies in front of the other inner projection in ``gate_up_proj``."""
    sources: dict[str, Source] = {}
    for kind in ("weight", *(["bias"] if bias else [])):
        gate, up = split(f"{theirs}gate_up_proj.{kind}", (inner, inner))
        down = same(f"{theirs}down_proj.{kind}")
        sources |= {f"{ours}{name}.{kind}": part for name, part in zip(NAMES, (gate, up, down), strict=True)}
    return sources


def balance_of(fields: Fields, layers: int, key: str = "router_aux_loss_coef", default: float = 0.001) -> float:
    """Return the weight of one layer's balance loss, of `layers` with experts.

    transformers puts the tokens of all these layers into one loss (docs/reference/mixers.md).
    """
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise fields.fail(key, "it must be a number from 0")
    return value / max(layers, 1)


def coefficient(kept: Mapping[str, Any], balance: float, layers: int, key: str = "router_aux_loss_coef") -> float:
    """Return the inverse of `balance_of`, as it was written where that says the same."""
    exact = balance * layers
    near = (kept.get(key), round(exact, 12), exact, math.nextafter(exact, 0), math.nextafter(exact, math.inf))
    found = (value for value in near if isinstance(value, int | float) and value / max(layers, 1) == balance)
    return next(found, exact)
