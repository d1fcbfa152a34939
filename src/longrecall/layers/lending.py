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
                lenders = (other for other, has in _mixers(layers[config.lender]) if has.lends_to(config))
                mixer.borrow(next(lenders))


def _mixers(layer: nn.Module) -> Iterator[tuple[Any, MixerConfig]]:
    for module in layer.modules():
        config = getattr(module, "config", None)
        if isinstance(config, MixerConfig):
            yield cast(Any, module), config


def lent_parameters(layers: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of one layer that others read: nobody may drop them while the layers between are run."""
    for layer in layers:
        for mixer, config in _mixers(layer):
            if config.lender is not None:
                yield from mixer.weights.parameters()
