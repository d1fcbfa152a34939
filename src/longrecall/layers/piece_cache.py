"""The cache of an attention layer whose sequence is cut over ranks: every rank gets the keys that its queries may see.

Every rank reads its own piece of keys from the exchange too. So all ranks take part in its backward, also the first
one, which needs no keys of others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from longrecall.layers.stepping.cache import Cache, appended, trimmed
from longrecall.ops.context.group import ContextGroup
from longrecall.ops.neighbours import all_columns, all_pieces


class PieceCache(NamedTuple):
    """What a rank's queries read, and what is kept."""

    seen: Cache
    """The columns up to the end of this rank's piece that its queries may see, and perhaps some that they may not."""
    whole: Cache
    """The cache after the whole sequence, on every rank."""
    in_order: bool
    """Whether the columns seen hold tokens one after the other without gaps, those of the piece last."""


def gather_cache(state: Cache | None, new: Cache, window: int | None, padded: bool, group: ContextGroup) -> PieceCache:
    """Exchange the keys of all ranks; of a window shorter than a piece only those that the next rank can see.

    Args:
        state: the cache before the first rank's piece; None = empty.
        new: the columns of this rank's piece, ``[B, T, ...]`` each.
        window: tokens that a token sees, itself included; None = all before it.
        padded: whether rows of any rank have padding.
        group: the ranks.
    """
    length = new["position"].shape[1]
    reach = None if window is None else window - 1
    if reach and reach <= length and not padded:
        return _of_neighbours(state, new, reach, group)
    every = appended(state, {name: all_columns(tensor) for name, tensor in new.items()})
    columns = every["position"].shape[1]
    end = columns - (group.world - group.rank - 1) * length
    seen = {name: tensor[:, :end] for name, tensor in every.items()}
    in_order = state is None and not padded
    if in_order and reach is not None:
        # Known without looking at positions, which would make the CPU wait.
        whole = {name: tensor[:, max(0, columns - reach) :] for name, tensor in every.items()}
    else:
        whole = trimmed(every, every["position"].amax(1, keepdim=True), window)
    return PieceCache(seen, whole, in_order)


def _of_neighbours(state: Cache | None, new: Cache, reach: int, group: ContextGroup) -> PieceCache:
    """The last `reach` columns of the rank before, ahead of a piece that is as long at least."""
    ends = {name: all_pieces(tensor[:, tensor.shape[1] - reach :]) for name, tensor in new.items()}
    own = {
        name: torch.cat([tensor[:, : tensor.shape[1] - reach], ends[name][group.rank]], dim=1)
        for name, tensor in new.items()
    }
    before = state if group.first else {name: tensor[group.rank - 1] for name, tensor in ends.items()}
    whole = {name: tensor[-1] for name, tensor in ends.items()}
    return PieceCache(appended(before, own), whole, state is None or not group.first)
