"""A GPU's memory: tensors, and which program wrote which number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longrecall.ops.kernels.dependent_launch import PREFETCHING
from tests.ops.gluon_emulation.hazards import Hazard
from tests.ops.gluon_emulation.registers import Register, register

NOBODY = -1


@dataclass
class Chain:
    """Whether a program still has to wait for the kernel before its own."""

    early: int = 0
    waiting: bool = False

    def begin(self) -> None:
        self.waiting = bool(self.early)

    def wait(self) -> None:
        self.waiting = False

    def let_next(self) -> None:
        if self.waiting:
            raise Hazard("the next kernel is let in while the one before may still be at work")

    def end(self) -> None:
        if self.waiting:
            raise Hazard("a program ends that has not waited for the kernel before")


@dataclass
class Memory:
    """The numbers of one tensor, flat; programs of a launch have no order, so none may use what another wrote."""

    numbers: Tensor
    writers: Tensor
    """The program that wrote each number in this launch."""
    chain: Chain
    owned: bool = False
    """Whether the kernel before leaves the tensor alone, inside of `execution.prefetching`."""
    program: int = 0
    """The one that runs."""

    def check(self, places: Tensor, inside: Tensor, *, writes: bool) -> None:
        """Places must be in the tensor, written by nobody else, and not used too early."""
        if self.chain.waiting and (writes or not self.owned or self.chain.early != PREFETCHING):
            raise Hazard("memory is used before the kernel before has been waited for")
        used = places[inside]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= self.numbers.numel()):
            raise Hazard(f"places {int(used.min())} to {int(used.max())} of a tensor of {self.numbers.numel()} numbers")
        writers = self.writers[used]
        if bool(((writers != NOBODY) & (writers != self.program)).any()):
            raise Hazard("two programs of a launch meet in a number that one of them writes")


@dataclass(frozen=True)
class Pointer:
    """Places in memory."""

    memory: Memory
    place: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.place + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.place - less)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Places, and which of them `mask` lets through; both of the shape that they have together."""
        inside = torch.as_tensor(True if mask is None else mask)
        places, inside = torch.broadcast_tensors(torch.as_tensor(self.place), inside.as_subclass(Tensor))
        return places.as_subclass(Tensor), inside

    def load(self, mask: Any = None, other: float = 0.0) -> Register:
        """`gl.load`: `other` where the mask says no."""
        places, inside = self.places(mask)
        self.memory.check(places, inside, writes=False)
        found = self.memory.numbers[torch.where(inside, places, 0)]
        return register(torch.where(inside, found, torch.tensor(other, dtype=found.dtype)))

    def store(self, value: Any, mask: Any = None) -> None:
        """`gl.store`: threads may write the same number to one place, but not different ones."""
        places, inside = self.places(mask)
        self.memory.check(places, inside, writes=True)
        given = torch.as_tensor(value).as_subclass(Tensor).to(self.memory.numbers.dtype)
        places, inside, given = torch.broadcast_tensors(places, inside, given)
        used, given = places[inside], given[inside]
        self.memory.numbers[used] = given
        if not torch.allclose(self.memory.numbers[used], given, rtol=0, atol=0, equal_nan=True):
            raise Hazard("threads write different numbers to one place")
        self.memory.writers[used] = self.memory.program
