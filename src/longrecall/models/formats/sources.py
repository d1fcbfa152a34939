"""Where each tensor of a native model comes from in a foreign checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longrecall.models.config import RecurrentConfig


def _same(tensor: Tensor) -> Tensor:
    return tensor


def squeeze_conv(weight: Tensor) -> Tensor:
    """Depthwise ``nn.Conv1d`` weight `[channels, 1, width]` -> `[channels, width]`."""
    if weight.ndim != 3 or weight.shape[1] != 1:
        raise ValueError(f"a depthwise convolution has shape [channels, 1, width], not {list(weight.shape)}")
    return weight[:, 0, :]


def repeat_heads(heads: int, times: int, then: Callable[[Tensor], Tensor] = _same) -> Callable[[Tensor], Tensor]:
    """Return a transform that gives every query head its own copy of the rows of its shared key/value head.

    Rows of the input are `heads` blocks of equal size; block h becomes blocks h*times .. h*times+times-1, which is how
    grouped heads are expanded at run time. `then` runs first (it may squeeze a convolution).
    """

    def transform(tensor: Tensor) -> Tensor:
        rows = then(tensor)
        if rows.shape[0] % heads:
            raise ValueError(f"{rows.shape[0]} rows cannot be split into {heads} heads")
        blocks = rows.reshape(heads, rows.shape[0] // heads, *rows.shape[1:])
        return blocks.repeat_interleave(times, dim=0).flatten(0, 1)

    return transform


@dataclass(frozen=True)
class Source:
    """One native tensor: the first of `names` that the file has, through `transform`.

    With no names the tensor does not exist in the foreign model and has the fixed value `constant` (a norm without
    learnt scale is a norm with scale 1).
    """

    names: tuple[str, ...]
    transform: Callable[[Tensor], Tensor] = field(default=_same)
    constant: float = 1.0

    @classmethod
    def of(cls, *names: str, transform: Callable[[Tensor], Tensor] = _same) -> Source:
        """Build a source from foreign names in the order of preference."""
        return cls(names, transform)

    def under(self, prefix: str) -> Source:
        """Return the same source with `prefix` before every name."""
        return Source(tuple(prefix + name for name in self.names), self.transform, self.constant)

    def shape(self, foreign: tuple[int, ...]) -> tuple[int, ...]:
        """Return the native shape that a foreign tensor of shape `foreign` becomes. ValueError when it cannot."""
        return tuple(self.transform(torch.empty(foreign, device="meta")).shape)


@dataclass(frozen=True)
class Layout:
    """A foreign checkpoint read as a native one."""

    config: RecurrentConfig
    sources: dict[str, Source]
    """Native tensor name -> where it comes from."""
    copies: dict[str, str] = field(default_factory=dict)
    """Foreign names that may be present but must equal a native tensor: a stored copy of a tied head."""
    ignored_suffixes: tuple[str, ...] = ()
    """Foreign names with these ends are computed constants, not learnt, and are skipped."""
