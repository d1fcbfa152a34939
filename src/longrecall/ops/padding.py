"""Padding that is known to lie after all real tokens. It can be skipped without sorting.

To find out where a mask has its padding, its values would have to be read back from the GPU. So whoever makes a mask
with its padding at the end says so with `execution.padding_at_the_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from longrecall.ops.execution import current


def is_at_the_end(mask: Tensor | None) -> bool:
    """Whether this tensor itself was announced. Any other mask, even one made from it, may have padding anywhere."""
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
    """Columns int64 ``[B, width]`` of the last `width` inputs, where `width` earlier inputs precede the real tokens."""
    return _once(mask, ("ends", width), lambda: mask.sum(1)[:, None] + torch.arange(width, device=mask.device))


class Newest(NamedTuple):
    """Where the last W inputs of a convolution lie. Rows have at least W columns; no copy of all inputs is made."""

    tokens: Tensor
    """Columns of the last real tokens, and of the first columns where there are fewer: int64 ``[B, W]``."""
    inputs: Tensor
    """Of W earlier inputs followed by those columns, the last W real ones: int64 ``[B, W]``."""


def newest(mask: Tensor, width: int) -> Newest:
    """Where the last `width` inputs lie; the padding is at the end."""

    def make() -> Newest:
        count, ahead = mask.sum(1)[:, None], torch.arange(width, device=mask.device)
        return Newest((count - width).clamp(min=0) + ahead, count.clamp(max=width) + ahead)

    return _once(mask, ("newest", width), make)
