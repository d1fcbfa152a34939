"""Layers of unequal states made alike: the smaller ones get channels that add nothing.

A stock config has one size for all layers. What brings a layer to it is surgery: `grow_state` with rows and
convolutions of zeros (its init `inherit`), which leaves the function as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longrecall.models.checkpoint import Checkpoint
from longrecall.models.sizes import PlainConfig, mixer_of, with_mixer
from longrecall.surgery.expansion import MIXER_TENSOR, Operation, edit_layer
from longrecall.surgery.inside import inner_path, mixer_at

if TYPE_CHECKING:
    from torch import Tensor

_METHOD, _INIT, _SIZE = "grow_state", "inherit", "state_dim"


@dataclass(frozen=True)
class Padding:
    """What makes the layers of a model alike.

    Attributes:
        plain: the padded model.
        operations: layer -> the surgery on it.
        sizes: (layer, state_dim before, after) of each.
    """

    plain: PlainConfig
    operations: Mapping[int, Operation]
    sizes: tuple[tuple[int, int, int], ...]


def plan_padding(plain: PlainConfig) -> Padding:
    """Return how every mixer that can grow gets the largest state of its type; nothing to do is no operation."""
    method = Operation.check(_METHOD, _INIT, {}, 0).method
    targets: dict[int, Mapping[str, Any]] = {}
    for index, layer in enumerate(plain.layers):
        found = mixer_at(mixer_of(layer), inner_path(method, mixer_of(layer)))
        if method.fits(str(found["type"])):
            targets[index] = found
    largest: dict[str, int] = {}
    for target in targets.values():
        largest[target["type"]] = max(largest.get(target["type"], 0), int(target[_SIZE]))
    layers, operations, sizes = list(plain.layers), {}, []
    for index, target in targets.items():
        old, new = int(target[_SIZE]), largest[target["type"]]
        if old == new:
            continue
        operation = Operation.check(_METHOD, _INIT, {_SIZE: new}, 0)
        layers[index] = with_mixer(layers[index], operation.plan(index, mixer_of(layers[index])).mixer)
        operations[index] = operation
        sizes.append((index, old, new))
    return Padding(PlainConfig.from_dict(plain.to_dict() | {"layers": layers}), operations, tuple(sizes))


class PaddedReader:
    """Reads the tensors of a checkpoint as those of its padded model, each of them once; a padded layer at a time."""

    def __init__(self, source: Checkpoint, padding: Padding) -> None:
        self._source = source
        self._padding = padding
        self._layer: int | None = None
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """Return a native tensor of the padded model."""
        found = MIXER_TENSOR.fullmatch(name)
        if found is None or int(found[1]) not in self._padding.operations:
            return self._source.read(name)
        layer, inner = int(found[1]), found[2]
        if layer != self._layer:
            prefix = f"model.layers.{layer}."
            own = (known for known in self._source.names() if known.startswith(prefix))
            names = [match[2] for match in map(MIXER_TENSOR.fullmatch, own) if match is not None]
            old = {known: self._source.read(prefix + known) for known in names}
            mixer = mixer_of(self._source.plain.layers[layer])
            self._tensors = edit_layer(layer, mixer, old, self._padding.operations[layer])
            self._layer = layer
        return self._tensors.pop(inner)
