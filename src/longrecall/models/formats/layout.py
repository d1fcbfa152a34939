"""A foreign checkpoint read as a native one, and the same tensors the other way round."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Part, Region, Shape, Source
from longrecall.models.sizes import PlainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from longrecall.models.config import RecurrentConfig


@dataclass(frozen=True)
class Layout:
    """A foreign checkpoint read as a native one."""

    plain: PlainConfig
    """What config.json says, in native terms."""
    sources: dict[str, Source]
    """Native tensor name -> where it comes from."""
    copies: dict[str, str] = field(default_factory=dict)
    """Foreign names that may be present but must equal a native tensor: a stored copy of a tied head."""
    copies_written: bool = False
    """Whether these copies are written even where the file that was read did not have them."""
    ignored_suffixes: tuple[str, ...] = ()
    """Foreign names with these ends are computed constants, not learnt, and are skipped."""
    travelling: tuple[str, ...] = ()
    """Foreign names that begin so belong to parts that longrecall does not run (vision, prediction of several tokens):
    they are kept as they are beside the native tensors, and are written back by export."""

    @cached_property
    def config(self) -> RecurrentConfig:
        """The same for transformers."""
        from longrecall.models.config import RecurrentConfig

        return RecurrentConfig.from_dict(self.plain.to_dict())

    def plan(self, names: Container[str]) -> TensorPlan:
        """Return the tensors of both sides, with every choice between spellings made as in a file of these names.

        Raises:
            ValueError: a mistake in the format: a native tensor without a source, or a foreign one in pieces that
                overlap or leave something out.
        """
        shapes = self.plain.tensor_shapes()
        if shapes.keys() != self.sources.keys():
            raise ValueError(f'the format and the model differ in tensor "{min(shapes.keys() ^ self.sources.keys())}"')
        sources = {name: self.sources[name].chosen(names) for name in shapes}
        return TensorPlan(shapes, sources, {name: source.parts(shapes[name]) for name, source in sources.items()})


class TensorPlan:
    """Every native tensor with the regions of foreign ones that it consists of.

    Attributes:
        shapes: native name -> shape, in the order of the native checkpoint.
        sources, parts: native name -> its source (without choices) and the regions that it names.
        foreign: foreign name -> shape.
    """

    def __init__(self, shapes: dict[str, Shape], sources: dict[str, Source], parts: dict[str, list[Part]]) -> None:
        self.shapes = shapes
        self.sources = sources
        self.parts = parts
        self.foreign: dict[str, Shape] = {}
        covered: dict[str, dict[tuple[int, int | None, int, int], int]] = defaultdict(dict)
        for regions in parts.values():
            for part in regions:
                if self.foreign.setdefault(part.name, part.whole_shape) != part.whole_shape:
                    raise ValueError(f'the parts of foreign tensor "{part.name}" disagree about its shape')
                covered[part.name][part.region] = math.prod(part.shape)
        for name, found in covered.items():
            if sum(found.values()) != math.prod(self.foreign[name]):
                raise ValueError(f'the parts of foreign tensor "{name}" overlap or leave something out')

    def assemble(self, name: str, read: Callable[[list[str]], list[Tensor]]) -> Tensor:
        """Return one native tensor; `read` returns foreign ones, of which it may be a view."""
        parts = self.parts[name]
        values = [part.read(whole) for part, whole in zip(parts, read([p.name for p in parts]), strict=True)]
        return self.sources[name].assemble(values, self.shapes[name])

    def piece(self, name: str) -> Part | None:
        """Return the rows of one foreign tensor that a native tensor is, row for row; None where it is otherwise."""
        if not isinstance(self.sources[name], Region):
            return None
        (part,) = self.parts[name]
        return part if part.of is None or (part.dim == 0 and part.blocks == 1) else None

    def foreign_tensors(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every foreign tensor; `read` returns native ones, each asked for once.

        In memory are one native tensor and the foreign ones of which a part is still to come.

        Raises:
            UserError: native tensors that no foreign ones give: repeated heads, or tensors shared by layers, that are
                no longer equal, a constant that has changed, or parts of one tensor in different types.
        """
        left = Counter(part.name for parts in self.parts.values() for part in parts)
        begun: dict[str, _Begun] = {}
        for name, parts in self.parts.items():
            tensor = read(name)
            try:
                values = self.sources[name].take_apart(tensor)
            except UserError as error:
                raise UserError(f'tensor "{name}": {error}') from None
            for part, value in zip(parts, values, strict=True):
                left[part.name] -= 1
                if part.of is None and not left[part.name] and part.name not in begun:
                    yield part.name, value
                    continue
                if part.name not in begun:
                    begun[part.name] = _Begun(name, value.new_empty(self.foreign[part.name]))
                begun[part.name].put(name, part, value)
                if not left[part.name]:
                    yield part.name, begun.pop(part.name).tensor


class _Begun:
    """A foreign tensor of which some regions are filled."""

    def __init__(self, first: str, tensor: Tensor) -> None:
        self.tensor = tensor
        self._first = first
        self._filled: dict[tuple[int, int | None, int, int], str] = {}

    def put(self, native: str, part: Part, value: Tensor) -> None:
        """Fill a region; UserError when it holds something else already, or the types differ."""
        if value.dtype != self.tensor.dtype:
            kinds = " and ".join(str(kind).removeprefix("torch.") for kind in (self.tensor.dtype, value.dtype))
            raise UserError(
                f'tensors "{self._first}" and "{native}" have different types ({kinds}), but "{part.name}" holds both; '
                "store the checkpoint in one type"
            )
        if part.region not in self._filled:
            self._filled[part.region] = native
            part.write(self.tensor, value)
        elif not bool((part.read(self.tensor) == value).all()):
            other = self._filled[part.region]
            raise UserError(f'tensors "{other}" and "{native}" differ, but the other model has "{part.name}" for both')
