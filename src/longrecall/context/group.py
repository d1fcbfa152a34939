"""The ranks that share one sequence, and the scopes in which they do."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from longrecall.errors import UserError
from longrecall.ops import execution


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks among which every sequence is cut: rank r holds the r-th piece, as long as every other piece."""

    process_group: Any
    """The group of torch.distributed; None for one rank alone."""
    rank: int
    """The place of this process in the group, and of its piece in the sequence."""
    world: int
    """Ranks in the group, and pieces of a sequence."""
    under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque, repr=False)
    """Messages that were sent and may not have arrived: their memory must not be used for anything else."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UserError(f"rank {self.rank} is not one of a context group of {self.world} ranks")
        if self.world > 1 and self.process_group is None:
            raise UserError(f"a context group of {self.world} ranks needs a process group of torch.distributed")

    @classmethod
    def of(cls, process_group: Any = None) -> ContextGroup:
        """The context group of a process group; None = all processes. It may be one dimension of a device mesh."""
        process_group = dist.group.WORLD if process_group is None else process_group
        return cls(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))

    @classmethod
    def alone(cls) -> ContextGroup:
        """The group of one rank, whose piece is the whole sequence."""
        return cls(None, 0, 1)

    @property
    def first(self) -> bool:
        """Whether this rank holds the first piece."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank holds the last piece."""
        return self.rank == self.world - 1


@dataclass(frozen=True, eq=False)
class RowPieces:
    """Where the pieces of B sequences begin and end among the N rows of a batch whose rows are documents.

    Packed documents are read with a row each. A document that began on the rank before goes on from its state there.
    Every other one begins from the state that it was given.
    """

    first: Tensor
    """int64 ``[B]``: the row with which the piece of each sequence begins."""
    last: Tensor
    """int64 ``[B]``: the row with which it ends."""
    goes_on: Tensor
    """bool ``[B]``: whether the first row goes on with a document of the rank before."""


def context_parallel(group: ContextGroup) -> contextlib.AbstractContextManager[None]:
    """Inside, every call of a model or an op reads this rank's piece of sequences that are cut over `group`.

    A group of one rank changes nothing. All ranks must make the same calls in the same order, backward passes too.
    """
    return execution.with_context(group if group.world > 1 else None)


def row_pieces(pieces: RowPieces | None) -> contextlib.AbstractContextManager[None]:
    """Inside, rows of batches are documents and not sequences; None = every row is one sequence."""
    return execution.with_row_pieces(pieces)
