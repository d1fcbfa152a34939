"""Where each tensor of a native model comes from in a foreign checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from longrecall.models.sizes import PlainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from longrecall.models.config import RecurrentConfig

Shape = tuple[int, ...]


class Transform(Protocol):
    """Makes a native tensor of a foreign one, and tells the shape without it; ValueError where that cannot be."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """The native tensor."""
        ...

    def shape(self, foreign: Shape) -> Shape:
        """The shape of it."""
        ...


@dataclass(frozen=True)
class Same:
    """The tensor as it is."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor

    def shape(self, foreign: Shape) -> Shape:
        return foreign


@dataclass(frozen=True)
class SqueezeConvolution:
    """Depthwise ``nn.Conv1d`` weight `[channels, 1, width]` -> `[channels, width]`."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape(tuple(tensor.shape)))

    def shape(self, foreign: Shape) -> Shape:
        if len(foreign) != 3 or foreign[1] != 1:
            raise ValueError(f"a depthwise convolution has shape [channels, 1, width], not {list(foreign)}")
        return foreign[0], foreign[2]


squeeze_conv = SqueezeConvolution()


@dataclass(frozen=True)
class RepeatHeads:
    """Gives every query head its own copy of the rows of its shared key/value head.

    Rows of the input are `heads` blocks of equal size; block h becomes blocks h*times .. h*times+times-1, which is how
    grouped heads are expanded at run time. `first` runs before it (it may squeeze a convolution).
    """

    heads: int
    times: int
    first: Transform = Same()

    def __call__(self, tensor: Tensor) -> Tensor:
        rows = self.first(tensor)
        self.shape(tuple(tensor.shape))
        blocks = rows.reshape(self.heads, rows.shape[0] // self.heads, *rows.shape[1:])
        return blocks.repeat_interleave(self.times, dim=0).flatten(0, 1)

    def shape(self, foreign: Shape) -> Shape:
        rows, *rest = self.first.shape(foreign)
        if rows % self.heads:
            raise ValueError(f"{rows} rows cannot be split into {self.heads} heads")
        return rows * self.times, *rest


@dataclass(frozen=True)
class Source:
    """One native tensor: the first of `names` that the file has, through `transform`.

    With no names the tensor does not exist in the foreign model and has the fixed value `constant` (a norm without
    learnt scale is a norm with scale 1).
    """

    names: tuple[str, ...]
    transform: Transform = Same()
    constant: float = 1.0

    @classmethod
    def of(cls, *names: str, transform: Transform = Same()) -> Source:
        """Build a source from foreign names in the order of preference."""
        return cls(names, transform)

    def under(self, prefix: str) -> Source:
        """Return the same source with `prefix` before every name."""
        return Source(tuple(prefix + name for name in self.names), self.transform, self.constant)

    def shape(self, foreign: Shape) -> Shape:
        """Return the native shape that a foreign tensor of shape `foreign` becomes. ValueError when it cannot."""
        return self.transform.shape(foreign)


@dataclass(frozen=True)
class Layout:
    """A foreign checkpoint read as a native one."""

    plain: PlainConfig
    """What config.json says, in native terms."""
    sources: dict[str, Source]
    """Native tensor name -> where it comes from."""
    copies: dict[str, str] = field(default_factory=dict)
    """Foreign names that may be present but must equal a native tensor: a stored copy of a tied head."""
    ignored_suffixes: tuple[str, ...] = ()
    """Foreign names with these ends are computed constants, not learnt, and are skipped."""

    @cached_property
    def config(self) -> RecurrentConfig:
        """The same for transformers."""
        from longrecall.models.config import RecurrentConfig

        return RecurrentConfig.from_dict(self.plain.to_dict())
