"""Where sequences are cut over the ranks of a context group."""

from __future__ import annotations

import contextlib

from longrecall.ops import execution
from longrecall.ops.context.group import ContextGroup, RowPieces


def context_parallel(group: ContextGroup) -> contextlib.AbstractContextManager[None]:
    """Inside, every call of a model or an op reads this rank's piece of sequences that are cut over `group`.

    A group of one rank changes nothing. All ranks must make the same calls in the same order, backward passes too.

    >>> with context_parallel(ContextGroup.alone()):
    ...     summed(torch.ones(2))                                 # a model or an op would be called here
    tensor([1., 1.])
    """
    return execution.with_context(group if group.world > 1 else None)


def row_pieces(pieces: RowPieces | None) -> contextlib.AbstractContextManager[None]:
    """Inside, rows of batches are documents and not sequences; None = every row is one sequence.

    >>> with row_pieces(None):
    ...     from_previous(torch.ones(2), torch.zeros(2))
    tensor([0., 0.])
    """
    return execution.with_row_pieces(pieces)
