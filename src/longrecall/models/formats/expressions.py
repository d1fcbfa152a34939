"""What sources are made of: expressions over foreign tensors that are evaluated in both directions.

Reading assembles a native tensor from regions of foreign ones; writing takes it apart into the same regions. Both know
all shapes beforehand, and neither looks at more than one native tensor. `sources` has a function for each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longrecall.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A region of one foreign tensor: the whole of it, or along `dim` the same slice of each of its `blocks`.

    Along `dim` the foreign tensor has `blocks * of` entries; the region has those from `start` on of every block.
    """

    name: str
    shape: Shape
    """Of the region."""
    start: int = 0
    of: int | None = None
    """Entries of one block; None = the region is the whole tensor."""
    blocks: int = 1
    dim: int = 0

    @property
    def whole_shape(self) -> Shape:
        """The shape of the foreign tensor."""
        if self.of is None:
            return self.shape
        return *self.shape[: self.dim], self.blocks * self.of, *self.shape[self.dim + 1 :]

    @property
    def region(self) -> tuple[int, int | None, int, int]:
        """What tells the regions of one tensor apart."""
        return self.start, self.of, self.blocks, self.dim

    def read(self, whole: Tensor) -> Tensor:
        """Return the region of a foreign tensor; a view where the region is in one piece."""
        if self.of is None:
            return whole
        region: Tensor = self._view(whole).flatten(self.dim, self.dim + 1)
        return region

    def write(self, whole: Tensor, value: Tensor) -> None:
        """Put `value` into the region of a foreign tensor in the making."""
        if self.of is None:
            whole.copy_(value)
        else:
            view = self._view(whole)
            view.copy_(value.reshape(view.shape))

    def _view(self, whole: Tensor) -> Tensor:
        assert self.of is not None
        blocks: Tensor = whole.unflatten(self.dim, (self.blocks, self.of))
        return blocks.narrow(self.dim + 1, self.start, self.shape[self.dim] // self.blocks)


class Source(ABC):
    """One native tensor as an expression over foreign ones.

    `parts` names the regions, `assemble` makes the native tensor of their values, `take_apart` is its exact inverse.
    """

    @abstractmethod
    def parts(self, shape: Shape) -> list[Part]:
        """Return the regions that a native tensor of this shape consists of; ValueError where it cannot."""

    @abstractmethod
    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        """Return the native tensor; it may be a view of the values, which are those of `parts` in their order."""

    @abstractmethod
    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        """Return the values of `parts`; UserError where no foreign tensors give this native one."""

    def members(self) -> tuple[Source, ...]:
        """Return the sources that this one is made of."""
        return ()

    def mapped(self, change: Callable[[Source], Source]) -> Source:
        """Return the same expression with `change` applied to each of its `members`."""
        del change
        return self

    def under(self, prefix: str) -> Source:
        """Return the same source with `prefix` before every foreign name."""
        return self.mapped(lambda inner: inner.under(prefix))

    def chosen(self, names: Container[str]) -> Source:
        """Return the source with every choice made: the first alternative that `names` has whole, else the first.

        Where `names` has shapes too (a mapping), alternatives that fit them come before others.
        """
        return self.mapped(lambda inner: inner.chosen(names))

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether foreign tensors of these shapes can be what this is made of, as far as it knows."""
        return all(inner.fits(shapes) for inner in self.members())


@dataclass(frozen=True)
class Region(Source):
    """A foreign tensor, or a region of it (`Part` explains the fields)."""

    name: str
    start: int = 0
    width: int | None = None
    of: int | None = None
    blocks: int = 1
    dim: int = 0

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        whole = shapes[self.name]
        return self.of is None or (len(whole) > self.dim and whole[self.dim] == self.blocks * self.of)

    def parts(self, shape: Shape) -> list[Part]:
        if self.width is not None and (len(shape) <= self.dim or shape[self.dim] != self.blocks * self.width):
            raise ValueError(f'a part of "{self.name}" has {self.blocks * self.width} rows, not shape {list(shape)}')
        return [Part(self.name, shape, self.start, self.of, self.blocks, self.dim)]

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        return values[0]

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def under(self, prefix: str) -> Source:
        # Written out: this is called for every tensor of a model, and `replace` takes its time.
        return Region(prefix + self.name, self.start, self.width, self.of, self.blocks, self.dim)


@dataclass(frozen=True)
class Constant(Source):
    """A tensor that the foreign model does not have, because all its numbers are fixed."""

    value: float = 1.0

    def parts(self, shape: Shape) -> list[Part]:
        return []

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        import torch

        return torch.full(shape, self.value)

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        if not bool((tensor == self.value).all()):
            raise UserError(f"not all of its numbers are {self.value:g}, and the other model has no place for them")
        return []


@dataclass(frozen=True)
class Either(Source):
    """Several ways in which files store the same; the first is the one that is written where nothing else is known."""

    options: tuple[Source, ...]

    def parts(self, shape: Shape) -> list[Part]:
        return self.options[0].parts(shape)

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        return self.options[0].assemble(values, shape)

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        return self.options[0].take_apart(tensor)

    def members(self) -> tuple[Source, ...]:
        return self.options

    def mapped(self, change: Callable[[Source], Source]) -> Source:
        return Either(tuple(change(option) for option in self.options))

    def chosen(self, names: Container[str]) -> Source:
        known = [option for option in self.options if all(name in names for name in foreign_names(option))]
        if isinstance(names, Mapping):
            known = [option for option in known if option.fits(names)] or known
        return (known or self.options)[0].chosen(names)


@dataclass(frozen=True)
class Stack(Source):
    """Equal sources stacked along a new first dimension: the experts of a layer."""

    inner: tuple[Source, ...]

    def parts(self, shape: Shape) -> list[Part]:
        if not shape or shape[0] != len(self.inner):
            raise ValueError(f"{len(self.inner)} tensors do not stack up to shape {list(shape)}")
        return [part for source in self.inner for part in source.parts(shape[1:])]

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        import torch

        per_source = len(values) // len(self.inner)
        pieces = (values[i * per_source : (i + 1) * per_source] for i in range(len(self.inner)))
        made = (source.assemble(piece, shape[1:]) for source, piece in zip(self.inner, pieces, strict=True))
        return torch.stack(list(made))

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        return [part for source, row in zip(self.inner, tensor, strict=True) for part in source.take_apart(row)]

    def members(self) -> tuple[Source, ...]:
        return self.inner

    def mapped(self, change: Callable[[Source], Source]) -> Source:
        return Stack(tuple(change(source) for source in self.inner))


@dataclass(frozen=True)
class Numbered(Source):
    """The stack of `count` equal sources whose names differ in a number, for which `each` has ``{}``.

    A `Stack` that is made when it is needed: a config.json alone may promise millions of tensors.
    """

    each: Source
    count: int

    def parts(self, shape: Shape) -> list[Part]:
        return self._stack().parts(shape)

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        return self._stack().assemble(values, shape)

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        return self._stack().take_apart(tensor)

    def members(self) -> tuple[Source, ...]:
        return self._stack().members()

    def mapped(self, change: Callable[[Source], Source]) -> Source:
        return replace(self, each=change(self.each))

    def chosen(self, names: Container[str]) -> Source:
        return self._stack().chosen(names)

    def _stack(self) -> Stack:
        return Stack(tuple(_with_number(self.each, number) for number in range(self.count)))


def _with_number(source: Source, number: int) -> Source:
    if isinstance(source, Region):
        # Written out, as in `under`: the experts of a model are tens of thousands.
        named = source.name.format(number)
        return Region(named, source.start, source.width, source.of, source.blocks, source.dim)
    return source.mapped(lambda inner: _with_number(inner, number))


@dataclass(frozen=True)
class Join(Source):
    """Sources one behind the other along `dim`; `sizes` are their entries there."""

    inner: tuple[Source, ...]
    sizes: tuple[int, ...]
    dim: int = 0

    def parts(self, shape: Shape) -> list[Part]:
        if len(shape) <= self.dim or shape[self.dim] != sum(self.sizes):
            raise ValueError(f"parts of {list(self.sizes)} do not add up to shape {list(shape)}")
        return [part for source, piece in self._pieces(shape) for part in source.parts(piece)]

    def assemble(self, values: Sequence[Tensor], shape: Shape) -> Tensor:
        import torch

        made, waiting = [], list(values)
        for source, piece in self._pieces(shape):
            count = len(source.parts(piece))
            made.append(source.assemble(waiting[:count], piece))
            del waiting[:count]
        return torch.cat(made, dim=self.dim)

    def take_apart(self, tensor: Tensor) -> list[Tensor]:
        pieces = tensor.split(list(self.sizes), dim=self.dim)
        return [part for source, piece in zip(self.inner, pieces, strict=True) for part in source.take_apart(piece)]

    def members(self) -> tuple[Source, ...]:
        return self.inner

    def mapped(self, change: Callable[[Source], Source]) -> Source:
        return replace(self, inner=tuple(change(source) for source in self.inner))

    def _pieces(self, shape: Shape) -> Iterator[tuple[Source, Shape]]:
        for source, size in zip(self.inner, self.sizes, strict=True):
            yield source, (*shape[: self.dim], size, *shape[self.dim + 1 :])


def regions(source: Source) -> Iterator[Region]:
    """Yield every region that the source mentions, those of all alternatives included."""
    if isinstance(source, Region):
        yield source
    for inner in source.members():
        yield from regions(inner)


def foreign_names(source: Source) -> Iterator[str]:
    """Yield the name of every foreign tensor that the source mentions, those of all alternatives included."""
    return (region.name for region in regions(source))
