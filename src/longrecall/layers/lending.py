"""Weights that several layers use: each is in one layer, which lends it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import nn

from longrecall.layers.descriptions.base import MixerConfig


def lend_weights(layers: Sequence[nn.Module]) -> None:
    """Hand every mixer whose description has a `lender` the mixer of that layer with which it shares weights."""
    for layer in layers:
        for mixer, config in _mixers(layer):
            if config.lender is not None:
                owner = layers[config.lender]
                lenders = (other for other, has in _mixers(owner) if has.lends_to(config))
                lender = next(lenders)
                mixer.borrow(lender, _way_to(owner, lender))


def _mixers(layer: nn.Module) -> Iterator[tuple[Any, MixerConfig]]:
    for module in layer.modules():
        config = getattr(module, "config", None)
        if isinstance(config, MixerConfig):
            yield cast(Any, module), config


def _way_to(owner: nn.Module, inner: nn.Module) -> tuple[nn.Module, ...]:
    """The owner and the modules in it that lead to `inner`, itself the last."""
    path = next(name for name, module in owner.named_modules() if module is inner)
    parts = path.split(".") if path else []
    names = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    return tuple(owner.get_submodule(name) for name in names)
