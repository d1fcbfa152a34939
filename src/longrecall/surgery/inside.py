"""Surgery on a mixer inside a layer's mixer: the base of a retrieval layer, a branch of a parallel or hymba layer.

The tensors around it stay; the mixer inside is enlarged as one that is a layer by itself.
"""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.hymba import HymbaConfig
from longrecall.layers.descriptions.parallel import ParallelConfig
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.surgery.method import ANY_MIXER, Method, MixerDescription, Plan, Tensors

_BRANCHED = {config.type: config.nested for config in (ParallelConfig, HymbaConfig)}


def inner_path(method: Method, mixer: MixerDescription) -> tuple[str, ...]:
    """Return the way to the mixer that `method` enlarges inside this one: names one inside the other; () = itself.

    Of branches it is the first that the method fits. Where none does it is the mixer itself, which the method then
    refuses.
    """
    kind = mixer.get("type")
    if method.mixers == ANY_MIXER:
        return ()
    if kind == RetrievalConfig.type:
        return ("base", *inner_path(method, mixer["base"]))
    for name in _BRANCHED.get(str(kind), ()):
        branch = mixer.get(name)
        if branch is not None:
            path = inner_path(method, branch)
            if method.fits(str(mixer_at(branch, path)["type"])):
                return (name, *path)
    return ()


def mixer_at(mixer: MixerDescription, path: tuple[str, ...]) -> MixerDescription:
    """Return the description that lies at the end of a path."""
    for name in path:
        mixer = mixer[name]
    return mixer


def check_init_inside(layer: int, mixer: MixerDescription, init: str) -> None:
    """Raise UserError for a handover: training finishes handovers of whole layers only."""
    if init == "handover":
        kind = mixer["type"]
        before = ", or expand with handover before add_retrieval" if kind == RetrievalConfig.type else ""
        raise UserError(
            f"layer {layer} is a {kind} layer, and a mixer inside one cannot hand over; use another init{before}"
        )


def plan_inside(mixer: MixerDescription, path: tuple[str, ...], inner: Plan) -> Plan:
    """Return the plan of the layer `mixer`, given the plan of the mixer at the end of a path."""
    outer, prefix = _prefix(()), _prefix(path)
    # The layer's norm is no part of the mixer.
    touched = tuple(prefix + name.removeprefix(outer) if name.startswith(outer) else name for name in inner.touched)
    return Plan(_replaced(mixer, path, inner.mixer), touched, inner.warnings)


def split_tensors(tensors: Tensors, path: tuple[str, ...]) -> tuple[Tensors, Tensors]:
    """Return the inner mixer's tensors, named as those of a plain layer (with `mixer_norm.weight`), and the others."""
    outer, prefix = _prefix(()), _prefix(path)
    inner = {outer + name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    others = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    return inner | {name: t for name, t in others.items() if not name.startswith(outer)}, others


def join_tensors(inner: Tensors, others: Tensors, path: tuple[str, ...]) -> Tensors:
    """Return the layer's tensors from the inner mixer's new ones and what `split_tensors` left aside."""
    outer, prefix = _prefix(()), _prefix(path)
    renamed = {prefix + name.removeprefix(outer): t for name, t in inner.items() if name.startswith(outer)}
    return others | renamed | {name: t for name, t in inner.items() if not name.startswith(outer)}


def _prefix(path: tuple[str, ...]) -> str:
    return ".".join(("mixer", *path, ""))


def _replaced(mixer: MixerDescription, path: tuple[str, ...], new: dict[str, Any]) -> dict[str, Any]:
    if not path:
        return new
    return {**mixer, path[0]: _replaced(mixer[path[0]], path[1:], new)}
