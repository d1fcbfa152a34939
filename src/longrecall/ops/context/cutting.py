"""Cutting whole sequences into the pieces that the ranks of a context group read."""

from __future__ import annotations

from torch import Tensor

from longrecall.errors import UserError
from longrecall.ops.context.group import ContextGroup


def own_piece(x: Tensor, group: ContextGroup) -> Tensor:
    """The columns of x ``[B, T, ...]`` that this rank reads: ``[B, T / world, ...]``.

    Packed documents are cut the same way, as one row ``[1, T]``; their `cu_seqlens` stay those of the whole.

    Raises:
        UserError: the ranks do not divide T.

    >>> ids = torch.arange(6)[None]
    >>> own_piece(ids, ContextGroup(process_group=object(), rank=1, world=2))
    tensor([[3, 4, 5]])
    """
    length = x.shape[1]
    if length % group.world:
        raise UserError(
            f"a sequence of {length} tokens is not divided by the {group.world} ranks of a context group; take "
            f"{length // group.world * group.world} tokens, or other ranks"
        )
    size = length // group.world
    return x[:, group.rank * size : (group.rank + 1) * size]
