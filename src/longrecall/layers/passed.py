"""Values that a layer passes on to later layers of the same pass over the tokens, beside the residual stream.

A description says which it `takes` and `gives`. Such a value is no state: it is made anew in every pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from longrecall.layers.descriptions.base import MixerConfig

LayerState = dict[str, Tensor]

Carried = Mapping[str, Tensor | None]
"""What earlier layers have given, by name: ``[B, T, ...]``. ``embedded`` is there from the start."""

EMBEDDED = "embedded"
"""The embeddings ``[B, T, d]``, as the first layer reads them."""

OF_THE_PASS = ("mask",)
"""What a layer may take that is no value of an earlier layer: bool ``[B, T]``, False = padding, or None."""

_PREFIX = "carried."


def wanted(config: MixerConfig) -> set[str]:
    """The names that a module, or one inside it, takes."""
    inner = [getattr(config, name) for name in config.nested]
    found = set(config.takes).union(*(wanted(part) for part in inner if part is not None))
    return found - set(OF_THE_PASS)


def given(config: MixerConfig) -> set[str]:
    """The names that a module, or one inside it, gives."""
    inner = [getattr(config, name) for name in config.nested]
    return set(config.gives).union(*(given(part) for part in inner if part is not None))


def taken_names(config: MixerConfig) -> tuple[str, ...]:
    """What is `wanted`, in a fixed order."""
    return tuple(sorted(wanted(config)))


def taken_arguments(names: tuple[str, ...], carried: Carried | None) -> dict[str, Tensor | None]:
    """The arguments of these names that a module gets besides the usual ones; None for what nobody has given."""
    return {name: None if carried is None else carried.get(name) for name in names}


def without_carried(state: LayerState) -> tuple[LayerState, dict[str, Tensor]]:
    """What a layer returned -> its new state alone, and the values that it passes on, by name."""
    places = {name: name.rpartition(_PREFIX) for name in state}
    passed = {place[2]: state[name] for name, place in places.items() if place[1]}
    return ({name: state[name] for name, place in places.items() if not place[1]} if passed else state), passed
