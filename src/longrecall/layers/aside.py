"""Layers inside layers in one decoding step: what the inner one gives is kept aside instead of being added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from longrecall.layers.decoding import Buffers, Step, Stream
from longrecall.layers.mixers.hymba import Hymba
from longrecall.layers.norm import RMSNorm


class Aside(Stream):
    """Reads another stream, and keeps a layer's output ``[B, d]`` aside instead of adding it.

    The first `product` is put off: what comes after the layer may form it together with others. Products of the same
    input with the weights `more` are formed beside the layer's first ones, and left in `rest`.
    """

    def __init__(self, stream: Stream, more: list[Tensor]) -> None:
        super().__init__(stream.x, stream.dtype)
        self.stream, self.more = stream, more
        self.rest: list[Tensor] | None = None
        self.found: Tensor | None = None
        self.product: tuple[Tensor, Tensor] | None = None

    def normed(self, norm: RMSNorm) -> Tensor:
        return self.stream.normed(norm)

    def project(self, norm: RMSNorm, weights: list[Tensor]) -> list[Tensor]:
        if self.rest is not None or any(x.dtype != weights[0].dtype for x in self.more):
            return self.stream.project(norm, weights)
        found = self.stream.project(norm, [*weights, *self.more])
        self.rest = found[len(weights) :]
        return found[: len(weights)]

    def projected(self, norm: RMSNorm) -> list[Tensor]:
        """The products with `more`, formed now if the layer has not asked for any."""
        return self.stream.project(norm, self.more) if self.rest is None else self.rest

    def add(self, y: Tensor) -> None:
        self.found = y if self.found is None else self.found + y

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        if self.found is None and self.product is None:
            self.product = (y, weight)
        else:
            super().add_product(y, weight)

    def result(self) -> Tensor:
        """The layer's output ``[B, d]``, the product included that was put off."""
        if self.product is not None:
            self.add(F.linear(*self.product))
            self.product = None
        assert self.found is not None
        return self.found


class HymbaStep:
    """The step of a layer whose branches have a step each, `inner`, by name."""

    def __init__(self, mixer: Hymba, inner: Mapping[str, Step]) -> None:
        self.mixer, self.inner = mixer, inner

    def __call__(self, stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor) -> None:
        total: Tensor | None = None
        for path, step in self.inner.items():
            aside = Aside(stream, [])
            step(aside, norm, buffers_under(buffers, path), position)
            y: Tensor = self.mixer.get_submodule(f"{path}_norm")(aside.result())
            total = y if total is None else total + y
        assert total is not None
        stream.add_product((total / len(self.inner)).to(stream.dtype), self.mixer.out_proj.weight)


def buffers_under(buffers: Buffers, path: str) -> Buffers:
    """The buffers of an inner layer; all of them for the empty path."""
    prefix = f"{path}." if path else ""
    return {name.removeprefix(prefix): x for name, x in buffers.items() if name.startswith(prefix)}


def innermost(step: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The steps inside a step that have none inside themselves, with the path before the names of their buffers."""
    inner: Mapping[str, Step] = getattr(step, "inner", {})
    if not inner:
        yield path, step
    for name, own in inner.items():
        yield from innermost(own, f"{path}.{name}" if path else name)
