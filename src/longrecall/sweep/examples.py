"""The examples of one cell as tensors on the training device, with the labelled positions of each row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longrecall.sweep.grid import Part, RunSpec
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


def draw_examples(spec: RunSpec, part: Part, split: Split, device: torch.device) -> Examples:
    """Draw one set of a split of a run's cell; UserError when its settings cannot be."""
    ids, labels = map(torch.from_numpy, sequence_batch(spec.task_of(part), split, spec.data_seed, part.rows))
    positions, targets = label_places(labels)
    return Examples(
        torch.cat([ids, ids.new_zeros(1, ids.shape[1])]).to(device),
        torch.cat([positions, positions.new_zeros(1, positions.shape[1])]).to(device),
        torch.cat([targets, targets.new_full((1, targets.shape[1]), IGNORE)]).to(device),
    )


Sets = tuple[Examples, ...]
"""The examples of every set that a run is trained, or tested, on."""


class Cells:
    """The training and test examples of cells, drawn once for all runs that follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[tuple[str, str], tuple[Sets, Sets]] = OrderedDict()

    def of(self, spec: RunSpec) -> tuple[Sets, Sets]:
        """Return (train, test) of a run's cell."""
        if spec.cell not in self._kept:
            train = tuple(draw_examples(spec, part, "train", self._device) for part in spec.train_parts)
            test = tuple(draw_examples(spec, part, "test", self._device) for part in spec.test_parts)
            self._kept[spec.cell] = train, test
            while len(self._kept) > MOST_CELLS:
                self._kept.popitem(last=False)
        return self._kept[spec.cell]


def epoch_steps(sizes: Sequence[tuple[int, int]], shuffle: bool, seed: int, epoch: int) -> list[tuple[int, Tensor]]:
    """Return the steps of an epoch: each a set's number and the rows of it, int64 ``[batch]`` on the CPU.

    `sizes`: rows and batch size of every set. A step has rows of one set, since another has rows of another length. As
    they are, the sets come one after the other (so has zoology's code them); with `shuffle` their steps are mixed.
    """
    orders = [epoch_order(rows, batch, shuffle, seed, epoch) for rows, batch in sizes]
    steps = [(index, rows) for index, order in enumerate(orders) for rows in order]
    if not shuffle or len(sizes) == 1:
        return steps
    return [steps[place] for place in torch.randperm(len(steps), generator=_generator(seed, epoch)).tolist()]


def epoch_order(rows: int, batch: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """Return int64 ``[steps, batch]`` on the CPU: the rows of each step of an epoch, the blank (`rows`) at the end.

    With `shuffle` the order depends on (seed, epoch) alone.
    """
    order = torch.arange(rows)
    if shuffle:
        order = torch.randperm(rows, generator=_generator(seed, epoch))
    blanks = -rows % batch
    return torch.cat([order, torch.full((blanks,), rows)]).view(-1, batch)


def _generator(seed: int, epoch: int) -> torch.Generator:
    # One seed for both numbers: a linear map with an odd factor keeps (seed, epoch) pairs apart in 63 bits.
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + epoch * 2 + 1) % (1 << 63))
