"""Padding that is known to lie after all real tokens: nothing has to be sorted to skip it.

Masks say where padding is, and finding out reads values back. Whoever makes such a mask says so with
`execution.padding_at_the_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from longrecall.ops.execution import current


def is_at_the_end(mask: Tensor | None) -> bool:
    """Whether this very tensor was announced: another one, made from it too, may hide tokens anywhere."""
    known = current().padding
    return known is not None and mask is known.mask


Result = TypeVar("Result")


def _once(mask: Tensor, key: Any, make: Callable[[], Result]) -> Result:
    known = current().padding
    if known is None or mask is not known.mask:
        return make()
    if key not in known.kept:
        known.kept[key] = make()
    found: Result = known.kept[key]
    return found


def ends(mask: Tensor, width: int) -> Tensor:
    """Of `width` earlier inputs followed by the real tokens, the columns of the last `width`: int64 ``[B, width]``."""
    return _once(mask, ("ends", width), lambda: mask.sum(1)[:, None] + torch.arange(width, device=mask.device))


class Newest(NamedTuple):
    """The last inputs of a convolution without a copy of all, for rows of at least as many columns."""

    tokens: Tensor
    """Columns of the last real tokens, and of the first columns where there are fewer: int64 ``[B, W]``."""
    inputs: Tensor
    """Of W earlier inputs followed by those columns, the last W real ones: int64 ``[B, W]``."""


def newest(mask: Tensor, width: int) -> Newest:
    """Where the last `width` inputs lie, padding being at the end."""

    def make() -> Newest:
        count, ahead = mask.sum(1)[:, None], torch.arange(width, device=mask.device)
        return Newest((count - width).clamp(min=0) + ahead, count.clamp(max=width) + ahead)

    return _once(mask, ("newest", width), make)
