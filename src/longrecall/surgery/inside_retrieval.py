"""Surgery on the mixer inside a retrieval layer: the layer's own tensors stay, the base is enlarged as ever."""

from __future__ import annotations

from longrecall.errors import UserError
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.surgery.method import ANY_MIXER, Method, MixerDescription, Plan, Tensors

_OUTER, _INNER = "mixer.", "mixer.base."


def works_inside(method: Method, mixer: MixerDescription) -> bool:
    """Return whether `method` enlarges the base of this layer instead of the layer itself."""
    return mixer.get("type") == RetrievalConfig.type and method.mixers != ANY_MIXER


def check_init_inside(layer: int, init: str) -> None:
    """Raise UserError for a handover: training finishes handovers of whole layers only."""
    if init == "handover":
        raise UserError(
            f"layer {layer} is a retrieval layer, and a mixer inside one cannot hand over; "
            "use another init, or expand with handover before add_retrieval"
        )


def plan_inside(mixer: MixerDescription, inner: Plan) -> Plan:
    """Return the plan of the layer `mixer`, given the plan of its base."""
    touched = tuple(_INNER + name.removeprefix(_OUTER) for name in inner.touched)
    return Plan({**mixer, "base": inner.mixer}, touched, inner.warnings)


def split_tensors(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the base's tensors, named as those of a plain layer (with `mixer_norm.weight`), and the others."""
    base = {_OUTER + name.removeprefix(_INNER): t for name, t in tensors.items() if name.startswith(_INNER)}
    others = {name: t for name, t in tensors.items() if not name.startswith(_INNER)}
    return base | {name: t for name, t in others.items() if not name.startswith(_OUTER)}, others


def join_tensors(base: Tensors, others: Tensors) -> Tensors:
    """Return the layer's tensors from the base's new ones and what `split_tensors` left aside."""
    inner = {_INNER + name.removeprefix(_OUTER): t for name, t in base.items() if name.startswith(_OUTER)}
    return others | inner | {name: t for name, t in base.items() if not name.startswith(_OUTER)}
