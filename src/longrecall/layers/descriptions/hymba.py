"""Hymba (Dong et al. 2025): its branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.layers.descriptions.base import MixerConfig, TensorShapes, linear, under
from longrecall.layers.descriptions.branches import BranchesConfig


@dataclass(frozen=True)
class HymbaConfig(BranchesConfig):
    """Two or three mixers of any type that read the same input.

    The paper's meta tokens are the attention's field `meta_tokens`: learned keys and values of the layer. The paper
    prepends learned tokens to the text of the whole model instead, so that there they also fill the state of the other
    branch before the first word; here that part is left to a learned initial state (training, `initial_state.kind:
    learned`).
    """

    type: ClassVar[str] = "hymba"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.hymba:Hymba"
    nested: ClassVar[tuple[str, ...]] = ("attention", "ssm", "third")

    attention: MixerConfig
    """The attention heads: full or with a window."""
    ssm: MixerConfig
    """The recurrent heads."""
    third: MixerConfig | None = None
    """One more branch of equal weight."""
    norm_eps: float = 1e-5

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        shapes: TensorShapes = {}
        for path, branch in self.branches().items():
            shapes |= under(path, branch.tensor_shapes(hidden_size)) | {f"{path}_norm.weight": (hidden_size,)}
        return shapes | linear("out_proj", hidden_size, hidden_size)
