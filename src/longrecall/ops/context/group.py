"""The ranks that share one sequence, and where its documents lie among them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from longrecall.errors import UserError


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks among which every sequence is cut: rank r holds the r-th piece, as long as every other piece.

    >>> group = ContextGroup.alone()                              # under torchrun: ContextGroup.of()
    >>> group.rank, group.world, group.first, group.last
    (0, 1, True, True)
    """

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
    """Which documents this rank holds a part of, where each of them is read in a row of its own.

    B sequences hold N documents, of which n have tokens in this rank's pieces. Those are the rows here. A document that
    began on the rank before goes on from its state there. Every other one begins from the state that it was given.

    >>> row, yes, no = torch.tensor([0]), torch.tensor([True]), torch.tensor([False])
    >>> pieces = RowPieces(documents=2, rows=row, ends=yes, first=row, last=row, goes_on=no)
    >>> pieces.documents - len(pieces.rows)                       # documents of which this rank holds nothing
    1
    """

    documents: int
    """N."""
    rows: Tensor
    """int64 ``[n]``: the documents of this rank, of all N, in order."""
    ends: Tensor
    """bool ``[n]``: which of them end on this rank."""
    first: Tensor
    """int64 ``[B]``: the row with which the piece of each sequence begins."""
    last: Tensor
    """int64 ``[B]``: the row with which it ends."""
    goes_on: Tensor
    """bool ``[B]``: whether the first row goes on with a document of the rank before."""
