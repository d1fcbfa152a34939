"""Fixed buffers that the recorded steps of a run read and write: one set of them for each shape of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.sweep.examples import Examples

Shape = tuple[int, int, int]
"""Rows of a batch, tokens of a row, labels of a row at most."""


def shape_of(examples: Examples, batch: int) -> Shape:
    """Return the shape of batches of these examples."""
    return batch, examples.ids.shape[1], examples.positions.shape[1]


@dataclass(eq=False)
class Buffers:
    """A batch: ids int64 ``[B, T]``, positions and targets int64 ``[B, M]``.

    `work` is the recorded step over them, None for the one that was recorded first. Where answers are read, they take
    the place of targets.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    work: Callable[[], None] | None = None

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> Buffers:
        """Return buffers of zeros."""
        batch, tokens, asked = shape

        def zeros(size: int) -> Tensor:
            return torch.zeros(batch, size, dtype=torch.long, device=device)

        return cls(zeros(tokens), zeros(asked), zeros(asked))

    def fill(self, examples: Examples, rows: Tensor, targets: bool = True) -> None:
        """Take rows (int64 ``[B]``) of the examples."""
        torch.index_select(examples.ids, 0, rows, out=self.ids)
        torch.index_select(examples.positions, 0, rows, out=self.positions)
        if targets:
            torch.index_select(examples.targets, 0, rows, out=self.targets)
