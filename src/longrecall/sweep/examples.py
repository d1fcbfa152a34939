"""The examples of one cell as tensors on the training device, with the labelled positions of each row."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.sweep.grid import RunSpec
from longrecall.sweep.predictor import IGNORE
from longrecall.tasks.sequences import Split, sequence_batch

MOST_CELLS = 4
"""Cells that are kept when no run uses them; runs come cell by cell."""


@dataclass(frozen=True)
class Examples:
    """Rows of one split; the last row of each tensor is a blank without labels, which fills up a last small batch.

    Attributes:
        ids: int64 ``[N + 1, T]``.
        positions: int64 ``[N + 1, M]``: where the labels stand, in order; 0 where a row has fewer than M.
        targets: int64 ``[N + 1, M]``: the labels there, -100 where a row has fewer.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor

    @property
    def rows(self) -> int:
        """Examples N, the blank left out."""
        return len(self.ids) - 1


def label_places(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (positions, targets), int64 ``[N, M]``, of labels int64 ``[N, T]``; M is the most labels of a row."""
    asked = labels != IGNORE
    most = max(1, int(asked.sum(1).max()))
    # A stable sort brings the labelled positions to the front, in their order.
    positions = torch.sort((~asked).to(torch.uint8), dim=1, stable=True).indices[:, :most]
    targets = labels.gather(1, positions)
    return torch.where(targets == IGNORE, 0, positions), targets


def draw_examples(spec: RunSpec, split: Split, device: torch.device) -> Examples:
    """Draw a split of a run's cell; UserError when its settings cannot be."""
    rows = spec.train if split == "train" else spec.test
    ids, labels = map(torch.from_numpy, sequence_batch(spec.create_task(), split, spec.data_seed, rows))
    positions, targets = label_places(labels)
    return Examples(
        torch.cat([ids, ids.new_zeros(1, ids.shape[1])]).to(device),
        torch.cat([positions, positions.new_zeros(1, positions.shape[1])]).to(device),
        torch.cat([targets, targets.new_full((1, targets.shape[1]), IGNORE)]).to(device),
    )


class Cells:
    """The training and test examples of cells, drawn once for all runs that follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[tuple[str, str], tuple[Examples, Examples]] = OrderedDict()

    def of(self, spec: RunSpec) -> tuple[Examples, Examples]:
        """Return (train, test) of a run's cell."""
        if spec.cell not in self._kept:
            drawn = draw_examples(spec, "train", self._device), draw_examples(spec, "test", self._device)
            self._kept[spec.cell] = drawn
            while len(self._kept) > MOST_CELLS:
                self._kept.popitem(last=False)
        return self._kept[spec.cell]


def epoch_order(rows: int, batch: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """Return int64 ``[steps, batch]`` on the CPU: the rows of each step of an epoch, the blank (`rows`) at the end.

    With `shuffle` the order depends on (seed, epoch) alone.
    """
    order = torch.arange(rows)
    if shuffle:
        # One seed for both numbers: a linear map with an odd factor keeps (seed, epoch) pairs apart in 63 bits.
        mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 2 + 1) % (1 << 63)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(mixed))
    blanks = -rows % batch
    return torch.cat([order, torch.full((blanks,), rows)]).view(-1, batch)
