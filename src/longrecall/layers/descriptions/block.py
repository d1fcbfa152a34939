"""A residual block of a layer: what is computed, the norms around it, and how its output is added to the stream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import MixerConfig, TensorShapes, under

RMS, LAYER = "rms", "layer"
NORMS = (RMS, LAYER)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = re.compile(r".*_norm|blocks|forward|training")
"""Names that something else in a layer has."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class NormConfig:
    """A norm over the channels of the residual stream.

    Raises:
        UserError: an unknown kind, or a value that no norm has.
    """

    kind: str = RMS
    """"rms" (Zhang and Sennrich 2019) or "layer" (Ba et al. 2016)."""
    offset: float = 0.0
    """What is added to the stored weight: 1 where checkpoints hold w for a scale of 1 + w (Gemma, Qwen3.5)."""
    eps: float | None = None
    """None = the model's `norm_eps`."""
    bias: bool = False
    """For "layer" alone."""

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise UserError(f'norm "{self.kind}" is none of {", ".join(NORMS)}.{did_you_mean(str(self.kind), NORMS)}')
        if not _is_number(self.offset) or self.offset not in (0, 1):
            raise UserError(f'"offset" of a norm is {self.offset!r}; it is 0, or 1 for a scale of 1 + weight')
        if self.eps is not None and not (_is_number(self.eps) and 0 < self.eps < 1):
            raise UserError(f'"eps" of a norm is {self.eps!r}; it must be a number between 0 and 1')
        if not isinstance(self.bias, bool) or (self.bias and self.kind == RMS):
            raise UserError(f'"bias" of a norm is {self.bias!r}; it is true or false, and an RMS norm has none')

    @classmethod
    def from_dict(cls, given: object) -> Self:
        """Build from plain data; raises UserError on an unknown key or a value that cannot be."""
        return cls(**_known_keys(given, cls, "a norm"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, without what has its default."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def tensor_shapes(self, size: int) -> TensorShapes:
        """Its tensors in a stream of `size` channels."""
        return {name: (size,) for name in ("weight", *(["bias"] if self.bias else []))}


@dataclass(frozen=True)
class BlockConfig:
    """One residual block: ``x + multiplier * post_norm(module(norm(x)))``.

    In the layer the module has the block's name, and its norms ``{name}_norm`` and ``{name}_post_norm``.
    """

    name: str
    module: MixerConfig
    norm: NormConfig | None = NormConfig()
    """None = the module reads the stream as it is."""
    post_norm: NormConfig | None = None
    multiplier: float = 1.0

    @classmethod
    def from_dict(cls, given: object, module: MixerConfig) -> Self:
        """Build from plain data and the checked description of the module; raises UserError on what cannot be."""
        values = _known_keys(given, cls, "a block")
        name, multiplier = values.get("name"), values.get("multiplier", 1.0)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
            raise UserError(f'the "name" of a block is {name!r}; it must be a word such as "mixer" or "mlp"')
        if not (_is_number(multiplier) and abs(multiplier) <= 1e18):
            raise UserError(f'"multiplier" of block "{name}" is {multiplier!r}; it must be a number')
        norms = {
            place: None if values[place] is None else NormConfig.from_dict(values[place])
            for place in ("norm", "post_norm")
            if place in values
        }
        return cls(name=name, module=module, multiplier=float(multiplier), **norms)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, without what has its default."""
        data: dict[str, Any] = {"name": self.name, "module": self.module.to_dict()}
        if self.norm != NormConfig():
            data["norm"] = None if self.norm is None else self.norm.to_dict()
        if self.post_norm is not None:
            data["post_norm"] = self.post_norm.to_dict()
        return data | ({"multiplier": self.multiplier} if self.multiplier != 1.0 else {})

    def tensor_shapes(self, hidden_size: int, module: TensorShapes) -> TensorShapes:
        """Its tensors in the order of the layer's ``state_dict``; `module`: those of the module."""
        shapes: TensorShapes = {}
        if self.norm is not None:
            shapes |= under(f"{self.name}_norm", self.norm.tensor_shapes(hidden_size))
        shapes |= under(self.name, module)
        if self.post_norm is not None:
            shapes |= under(f"{self.name}_post_norm", self.post_norm.tensor_shapes(hidden_size))
        return shapes


def _known_keys(given: object, kind: type, what: str) -> dict[str, Any]:
    known = [field.name for field in fields(kind)]
    if not isinstance(given, Mapping):
        raise UserError(f"{what} is a mapping with the keys {', '.join(known)}; got {given!r}")
    for key in given:
        if key not in known:
            raise UserError(f'{what} has no key "{key}".{did_you_mean(str(key), known)}')
    return dict(given)
