"""Shared memory of a program, and what is under way from it and to it.

Every number has marks for what has happened to it since the last barrier and the last fence. Barriers that the compiler
puts between plain loads and stores by itself are taken for granted. Those around asynchronous copies and products are
asked of the kernel, whatever the compiler may add.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.ops.gluon_emulation.hazards import Hazard
from tests.ops.gluon_emulation.memory import Pointer
from tests.ops.gluon_emulation.registers import Pending, Register, register

LANDED, STORED, LOADED, READ, UNFENCED = 1, 2, 4, 8, 16
"""Since the last barrier: a copy has come, threads have stored or loaded, a product that read this has ended. Since the
last fence: either of the first two."""


@dataclass(frozen=True, eq=False)
class Shared:
    """A view of shared memory, and the same view of its marks, of copies on their way to it, of products reading it."""

    traffic: Traffic
    numbers: Tensor
    marks: Tensor
    copies: Tensor
    readers: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def _view(self, name: str, *args: Any) -> Shared:
        views = {one: getattr(getattr(self, one), name)(*args) for one in ("numbers", "marks", "copies", "readers")}
        return replace(self, **views)

    def index(self, place: int) -> Shared:
        if not 0 <= place < len(self.numbers):
            raise Hazard(f"buffer {int(place)} of {len(self.numbers)}")
        return self._view("select", 0, int(place))

    def slice(self, first: int, count: int, dim: int = 0) -> Shared:
        if first < 0:
            raise Hazard(f"a slice from {int(first)} on")
        return self._view("narrow", dim, int(first), int(count))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view("permute", order)

    def reshape(self, shape: list[int]) -> Shared:
        return self._view("view", shape)

    def reinterpret(self, dtype: torch.dtype, shape: list[int], _: Any) -> Shared:
        if dtype != self.numbers.dtype:
            raise NotImplementedError("memory read as another dtype is not emulated")
        return self.reshape(shape)

    def load(self, _: Any) -> Register:
        self.refuse(self.copies.any(), "a load where a copy is on its way that has not been waited for")
        self.refuse(self.marks & LANDED, "a load of what a copy brought, before a barrier")
        self.marks.bitwise_or_(LOADED)
        return register(self.numbers)

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.numbers.dtype:
            raise Hazard(f"{value.dtype} {list(value.shape)} stored to {self.numbers.dtype} {list(self.shape)}")
        self.claim("a store")
        self.numbers.copy_(value)
        self.marks.bitwise_or_(STORED | UNFENCED)

    def claim(self, what: str) -> None:
        """Check that nothing else is under way here: `what` is about to write."""
        self.refuse(self.copies, f"{what} where a copy is on its way")
        self.refuse(self.readers, f"{what} where a product reads that has not been waited for")
        self.refuse(self.marks & READ, f"{what} where a product has read, before a barrier: other warps may still")

    def operand(self) -> Tensor:
        """The numbers, for a product of warp groups."""
        self.refuse(self.copies, "a product of what a copy that has not been waited for is to bring")
        self.refuse(self.marks & (LANDED | STORED), "a product of what was written, before a barrier")
        self.refuse(self.marks & UNFENCED, "a product of what was written, before a fence")
        return self.numbers

    def refuse(self, where: Tensor, why: str) -> None:
        if bool(where.any()):
            raise Hazard(why)


@dataclass(frozen=True, eq=False)
class Copy:
    """An asynchronous copy on its way: what its source held when it was sent for."""

    to: Shared
    source: Pointer
    mask: Any
    value: Tensor

    def land(self) -> None:
        if not torch.equal(self.source.load(self.mask), self.value):
            raise Hazard("the source of a copy was written to while the copy was on its way")
        self.to.numbers.copy_(self.value)
        self.to.copies.sub_(1)
        self.to.marks.bitwise_or_(LANDED | UNFENCED)


@dataclass(frozen=True, eq=False)
class Product:
    """An asynchronous product of warp groups under way."""

    operands: tuple[Shared, ...]


@dataclass
class Traffic:
    """All that is under way in one program."""

    rooms: list[Shared] = field(default_factory=list)
    sent: list[Copy] = field(default_factory=list)
    """Copies of no group yet."""
    groups: list[list[Copy]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)

    def begin(self) -> None:
        """Of a new program, which has no memory yet."""
        for left in (self.rooms, self.sent, self.groups, self.products):
            left.clear()

    def allocate(self, dtype: torch.dtype, shape: list[int], _: Any, value: Tensor | None = None) -> Shared:
        """Memory that nobody has written to is NaN."""
        marks, copies, readers = (torch.zeros(shape, dtype=torch.uint8) for _ in range(3))
        room = Shared(self, torch.full(shape, float("nan"), dtype=dtype), marks, copies, readers)
        self.rooms.append(room)
        if value is not None:
            room.store(value)
        return room

    def barrier(self) -> None:
        for room in self.rooms:
            room.marks.bitwise_and_(UNFENCED)

    def fence(self) -> None:
        for room in self.rooms:
            room.marks.bitwise_and_(LANDED | STORED | LOADED | READ)

    def copy(self, to: Shared, source: Pointer, mask: Any = None) -> None:
        """Send for numbers; zeros where the mask says no. They are there after `wait`, in no time before."""
        places, _ = source.places(mask)
        if places.shape != to.shape or source.memory.numbers.dtype != to.numbers.dtype:
            raise Hazard(f"a copy of {list(places.shape)} to {list(to.shape)} of {to.numbers.dtype}")
        to.claim("a copy")
        to.refuse(to.marks & (LOADED | STORED), "a copy where threads have loaded or stored, before a barrier")
        to.copies.add_(1)
        self.sent.append(Copy(to, source, mask, source.load(mask)))

    def commit(self) -> None:
        self.groups.append(self.sent)
        self.sent = []

    def wait(self, left: int = 0) -> None:
        """Until no more than the last `left` groups are on their way."""
        while len(self.groups) > left:
            for copy in self.groups.pop(0):
                copy.land()

    def multiply(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Register | Pending:
        """acc + a b, or a b. Asynchronous ones end in their order; all before a synchronous one end with it."""
        if not isinstance(b, Shared):
            raise Hazard("the right operand of a product of warp groups lies in shared memory")
        operands = tuple(x for x in (a, b) if isinstance(x, Shared))
        left, right = (x.operand() if isinstance(x, Shared) else x for x in (a, b))
        before = acc.value if isinstance(acc, Pending) else acc
        rows, inner, columns = *left.shape, right.shape[1]
        if before.shape != (rows, columns) or len(right) != inner or rows % 64 or columns % 8 or inner % 16:
            raise Hazard(f"{list(left.shape)} times {list(right.shape)} onto {list(before.shape)}")
        if {left.dtype, right.dtype} != {torch.bfloat16} or before.dtype != torch.float32:
            raise Hazard("a product of something else than bfloat16, onto something else than float32")
        value = left.float() @ right.float()
        product = Product(operands)
        self.products.append(product)
        for x in operands:
            x.readers.add_(1)
        pending = Pending((before + value if use_acc else value).as_subclass(Register), product)
        return pending if is_async else self.wait_products(0, [pending])

    def wait_products(self, left: int, deps: Any) -> Any:
        """Until no more than the last `left` products are under way; results of the others can be used."""
        while len(self.products) > left:
            for x in self.products.pop(0).operands:
                x.readers.sub_(1)
                x.marks.bitwise_or_(READ)

        def ready(x: Any) -> Any:
            return x.value if isinstance(x, Pending) and x.product not in self.products else x

        found = tuple(map(ready, deps))
        return found if len(found) > 1 else found[0]

    def end(self) -> None:
        """Nothing may be under way when a program ends."""
        if self.products:
            raise Hazard(f"{len(self.products)} products that nobody has waited for")
        if self.sent or any(self.groups):
            raise Hazard("copies that nobody has waited for")
