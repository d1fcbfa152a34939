"""What a piece of a sequence needs of the ranks around it: last inputs of convolutions, columns of the whole sequence.

Without a context group the functions return what they were given. Those that return a tensor with a gradient exchange
gradients in the backward, on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrecall.ops import execution
from longrecall.ops.borders import inputs_of_previous, state_after, state_before


class InputsSoFar(NamedTuple):
    """All inputs of a long convolution, zeros in the place of padding."""

    before: Tensor
    """Those before this rank's piece ``[B, S + rank * T, C]``, the newest last."""
    own: Tensor
    """The piece ``[B, T, C]``. It comes out of the exchange, so that every rank takes part in its backward."""
    whole: Tensor
    """Those of the whole sequence ``[B, S + world * T, C]``, the newest last."""


def inputs_before(x: Tensor, start: Tensor, mask: Tensor | None) -> Tensor:
    """The last N inputs before this rank's piece of a convolution ``[B, N, C]``, in the dtype of x.

    Args:
        x: the piece ``[B, T, C]``.
        start: those before the first piece ``[B, N, C]``.
        mask: bool ``[B, T]``, False = padding, which is skipped; None on all ranks or on none.
    """
    start = start.to(x.dtype)
    if execution.context() is None or not start.shape[1]:
        return start
    if _all_from_piece(x, start, mask):
        # Known before the convolution is made, so nobody waits for it.
        return inputs_of_previous(x[:, x.shape[1] - start.shape[1] :], start)
    return state_before(start, x)


def inputs_after(y: Tensor, last: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where `inputs_before` waits for it, hand on the last N inputs ``[B, N, C]`` after this rank's piece.

    Args:
        y: outputs for the piece ``[B, T, ...]``.
        last: in the dtype of the piece.

    Returns:
        `y` and `last`, to be used instead.
    """
    if execution.context() is None or not last.shape[1] or _all_from_piece(y, last, mask):
        return y, last
    return state_after(y, last)


def inputs_so_far(x: Tensor, given: Tensor | None, mask: Tensor | None) -> InputsSoFar:
    """All inputs before this rank's piece ``[B, T, C]`` and of the whole sequence, for a filter without end.

    Args:
        given: what was read before the first piece ``[B, S, C]``, the newest last; None = nothing (S = 0).
        mask: bool ``[B, T]``, False = padding; None on all ranks or on none.

    Raises:
        ValueError: there is no context group.
    """
    group = execution.context()
    if group is None:
        raise ValueError("pieces of a sequence are exchanged inside context_parallel only")
    x = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
    length, every = x.shape[1], all_columns(x)
    given = x.new_zeros((x.shape[0], 0, x.shape[2])) if given is None else given.to(x.dtype)
    whole, start = torch.cat([given, every], dim=1), given.shape[1] + group.rank * length
    before, own = whole[:, :start], whole[:, start : start + length]
    if mask is None:
        return InputsSoFar(before, own, whole)
    real = torch.cat([mask.new_ones((len(mask), given.shape[1])), all_columns(mask)], dim=1)
    return InputsSoFar(_padding_first(before, real[:, :start]), own, _padding_first(whole, real))


def all_pieces(x: Tensor) -> Tensor:
    """What all ranks passed in, of one shape: ``[...]`` -> ``[world, ...]``; ``[1, ...]`` without a context group.

    Where ranks hold rows of different documents (`context.row_pieces`), every rank gets its own rows of all ranks.
    """
    if execution.context() is None:
        return x[None]
    from longrecall.ops.context.exchange import all_gather

    pieces = execution.row_pieces()
    if pieces is None:
        return all_gather(x)
    every = x.new_zeros((pieces.documents, *x.shape[1:])).index_copy(0, pieces.rows, x)
    return all_gather(every)[:, pieces.rows]


def all_columns(x: Tensor) -> Tensor:
    """Pieces ``[B, T, ...]`` -> the columns of the whole sequence ``[B, world * T, ...]``, on every rank."""
    return x if execution.context() is None else all_pieces(x).transpose(0, 1).flatten(1, 2)


def _padding_first(x: Tensor, real: Tensor) -> Tensor:
    order = torch.argsort(real.to(torch.int8), dim=1, stable=True)
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


def _all_from_piece(x: Tensor, start: Tensor, mask: Tensor | None) -> bool:
    """Whether the last inputs after a piece lie in it, in all rows and on all ranks: pieces have equal shapes."""
    return mask is None and x.shape[1] >= start.shape[1]
