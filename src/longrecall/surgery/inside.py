"""Surgery on a mixer inside another one: the base of a retrieval layer, a branch of parallel ones.

Everything else of the layer stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.handover import HandoverConfig
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.surgery.method import ANY_MIXER, Method, MixerDescription, Plan, Tensors

_MIXER = "mixer."

Path = tuple[str, ...]
"""Fields of descriptions that lead to a mixer from the layer's own one; none for that itself."""


def inner_path(method: Method, mixer: MixerDescription) -> Path:
    """Return where in a layer's mixer `method` works: on the mixer itself, or on the one inside it that it fits.

    Where it fits none it is the mixer itself, which the method then refuses by its name. A layer that is handing over
    is not looked into: what is inside will not all stay.
    """
    if method.mixers == ANY_MIXER:
        return ()
    found = _search(method, mixer)
    # Whoever names a retrieval layer means the mixers that it is made of.
    base = ("base",) if mixer.get("type") == RetrievalConfig.type else ()
    return base if found is None else found


def _search(method: Method, mixer: MixerDescription) -> Path | None:
    if method.fits(str(mixer.get("type"))):
        return ()
    if mixer.get("type") == HandoverConfig.type:
        return None
    for name, inner in mixer.items():
        found = _search(method, inner) if isinstance(inner, Mapping) and "type" in inner else None
        if found is not None:
            return (name, *found)
    return None


def mixer_at(mixer: MixerDescription, path: Path) -> MixerDescription:
    """Return the description at `path`."""
    for name in path:
        mixer = mixer[name]
    return mixer


def check_init_inside(layer: int, mixer: MixerDescription, path: Path, init: str) -> None:
    """Raise UserError for a handover: training finishes handovers of whole layers only."""
    if path and init == "handover":
        raise UserError(
            f"layer {layer} is a {mixer['type']} layer, and a mixer inside one cannot hand over; use another init"
            + (", or expand with handover before add_retrieval" if mixer["type"] == "retrieval" else "")
        )


def plan_inside(mixer: MixerDescription, path: Path, inner: Plan) -> Plan:
    """Return the plan of the layer `mixer`, given the plan of the mixer at `path`."""
    touched = tuple(_placed(name, path) for name in inner.touched)
    return Plan(_replaced(mixer, path, inner.mixer), touched, inner.warnings)


def _placed(name: str, path: Path) -> str:
    # The layer's norm is shared by everything inside.
    return _prefix(path) + name.removeprefix(_MIXER) if name.startswith(_MIXER) else name


def _replaced(mixer: MixerDescription, path: Path, new: Mapping[str, Any]) -> dict[str, Any]:
    if not path:
        return dict(new)
    return {**mixer, path[0]: _replaced(mixer[path[0]], path[1:], new)}


def _prefix(path: Path) -> str:
    return ".".join(("mixer", *path, ""))


def split_tensors(tensors: Tensors, path: Path) -> tuple[Tensors, Tensors]:
    """Return the tensors of the mixer at `path`, named as those of a plain layer (with its norm), and the others."""
    prefix = _prefix(path)
    inner = {_MIXER + name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    others = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    return inner | {name: t for name, t in others.items() if not name.startswith(_MIXER)}, others


def join_tensors(inner: Tensors, others: Tensors, path: Path) -> Tensors:
    """Return the layer's tensors from the new ones at `path` and what `split_tensors` left aside."""
    return others | {_placed(name, path): tensor for name, tensor in inner.items()}
