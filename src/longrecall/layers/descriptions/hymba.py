"""Hymba (Dong et al. 2025): its branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from longrecall.layers.descriptions.base import NO_ROOM, MixerConfig, StateShapes, TensorShapes, linear, under

BRANCHES = ("attention", "ssm", "third")


@dataclass(frozen=True)
class HymbaConfig(MixerConfig):
    """Two or three mixers of any type that read the same input.

    The paper's meta tokens are the attention's field `meta_tokens`: learned keys and values of the layer. The paper
    prepends learned tokens to the text of the whole model instead, so that there they also fill the state of the other
    branch before the first word; here that part is left to a learned initial state (training, `initial_state.kind:
    learned`).
    """

    type: ClassVar[str] = "hymba"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.hymba:Hymba"
    nested: ClassVar[tuple[str, ...]] = BRANCHES

    attention: MixerConfig
    """The attention heads: full or with a window."""
    ssm: MixerConfig
    """The recurrent heads."""
    third: MixerConfig | None = None
    """One more branch of equal weight."""
    norm_eps: float = 1e-5

    def branches(self) -> dict[str, MixerConfig]:
        """The branches that there are, by name."""
        found = {name: getattr(self, name) for name in BRANCHES}
        return {name: config for name, config in found.items() if config is not None}

    def to_dict(self) -> dict[str, Any]:
        branches = {name: config.to_dict() for name, config in self.branches().items()}
        return {"type": self.type, **branches, "norm_eps": self.norm_eps}

    def state_shapes(self) -> StateShapes:
        return {
            f"{path}.{name}": shape
            for path, config in self.branches().items()
            for name, shape in config.state_shapes().items()
        }

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        shapes: TensorShapes = {}
        for path, branch in self.branches().items():
            shapes |= under(path, branch.tensor_shapes(hidden_size)) | {f"{path}_norm.weight": (hidden_size,)}
        return shapes | linear("out_proj", hidden_size, hidden_size)

    def why_no_room(self) -> str | None:
        # Token ids have room around a whole layer only.
        found = [f"{one.type} {NO_ROOM}" if one.reads_tokens else one.why_no_room() for one in self.branches().values()]
        return next((reason for reason in found if reason is not None), None)
