"""Sources that change one foreign tensor: its shape, the order of its rows, copies of its heads."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Part, Region, Shape, Source, foreign_names

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Transform(Source):
    """A native tensor made of one other source. Subclasses say the shape before, and both directions."""

    inner: Source

    @abstractmethod
    def before(self, shape: Shape) -> Shape:
        """Return the shape that becomes the native `shape`; ValueError where none does."""

    @abstractmethod
    def forwards(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Return the native tensor, of shape `shape`."""

    @abstractmethod
    def backwards(self, tensor: Tensor) -> Tensor:
        """Return what `forwards` would make `tensor` of; UserError where there is nothing."""

    def parts(self, shape: Shape) -> list[Part]:
        return self.inner.parts(self.before(shape))

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        return self.forwards(self.inner.assemble(values, self.before(shape)), shape)

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        return self.inner.take_apart(self.backwards(tensor))

    def members(self) -> tuple[Source, ...]:
        return (self.inner,)

    def mapped(self, change: Callable[[Source], Source]) -> Self:
        return replace(self, inner=change(self.inner))


@dataclass(frozen=True)
class SqueezeConvolution(Transform):
    """Depthwise ``nn.Conv1d`` weight `[channels, 1, width]` -> `[channels, width]`."""

    def before(self, shape: Shape) -> Shape:
        channels, width = shape
        return channels, 1, width

    def forwards(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor.squeeze(1)

    def backwards(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(1)


@dataclass(frozen=True)
class Reshape(Transform):
    """The same numbers in the same order under another shape."""

    foreign: Shape

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        whole = self.inner
        as_it_is = isinstance(whole, Region) and whole.of is None
        return super().fits(shapes) and (not as_it_is or shapes[next(foreign_names(whole))] == self.foreign)

    def before(self, shape: Shape) -> Shape:
        if math.prod(shape) != math.prod(self.foreign):
            raise ValueError(f"{list(self.foreign)} does not have the numbers of {list(shape)}")
        return self.foreign

    def forwards(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor.reshape(shape)

    def backwards(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.foreign)


@dataclass(frozen=True)
class Transpose(Transform):
    """The last two dimensions exchanged."""

    def before(self, shape: Shape) -> Shape:
        *rest, rows, columns = shape
        return *rest, columns, rows

    def forwards(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor.transpose(-1, -2)

    def backwards(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(-1, -2)


@dataclass(frozen=True)
class Reorder(Transform):
    """Row i of the native tensor is row `order[i]` of the foreign one."""

    order: tuple[int, ...]

    def before(self, shape: Shape) -> Shape:
        if not shape or shape[0] != len(self.order):
            raise ValueError(f"an order of {len(self.order)} rows does not fit shape {list(shape)}")
        return shape

    def forwards(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor[list(self.order)]

    def backwards(self, tensor: Tensor) -> Tensor:
        rows = sorted(range(len(self.order)), key=self.order.__getitem__)
        return tensor[rows]


@dataclass(frozen=True)
class RepeatHeads(Transform):
    """Gives every query head its own copy of the rows of its shared key/value head.

    Rows of the foreign tensor are `heads` blocks of equal size; block h becomes blocks h*times .. h*times+times-1,
    which is how grouped heads are expanded at run time.
    """

    heads: int
    times: int

    def before(self, shape: Shape) -> Shape:
        rows, *rest = shape
        if rows % (self.heads * self.times):
            raise ValueError(f"{rows} rows cannot be split into {self.heads * self.times} heads")
        return rows // self.times, *rest

    def forwards(self, tensor: Tensor, shape: Shape) -> Tensor:
        blocks: Tensor = tensor.unflatten(0, (self.heads, -1))
        return blocks.repeat_interleave(self.times, dim=0).flatten(0, 1)

    def backwards(self, tensor: Tensor) -> Tensor:
        blocks: Tensor = tensor.unflatten(0, (self.heads, self.times, -1))
        same = (blocks == blocks[:, :1]).flatten(2).all(dim=2)
        if not bool(same.all()):
            group, copy = (~same).nonzero()[0].tolist()
            first = group * self.times
            raise UserError(
                f"heads {first} and {first + copy} differ, but the other model has one for both; "
                "write it with a head for each (--new-config)"
            )
        return blocks[:, 0].flatten(0, 1)
