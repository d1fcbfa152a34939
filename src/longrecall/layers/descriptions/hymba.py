"""Hymba (Dong et al. 2025): its branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, TensorShapes, linear, under
from longrecall.layers.descriptions.branches import BranchesConfig


@dataclass(frozen=True)
class HymbaConfig(BranchesConfig):
    """Two or three mixers of any type that read the same input.

    The paper's meta tokens are learned embeddings in front of every text, `memory_tokens` of the whole model and of
    its attention. The attention's field `meta_tokens` is something smaller: learned keys and values of the layer, which
    do not fill the state of the other branch.
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

    def width(self, hidden_size: int) -> int:
        """Channels of every branch, which are normed and projected together.

        The published models' branches have no projection of their own (`out_proj` false): they are as wide inside.

        Raises:
            UserError: branches of different widths.
        """
        widths = {path: branch.output_size(hidden_size) for path, branch in self.branches().items()}
        if len(set(widths.values())) > 1:
            shown = ", ".join(f"{path} {width}" for path, width in widths.items())
            raise UserError(f'mixer "{self.type}": the branches return different numbers of channels ({shown})')
        return next(iter(widths.values()))

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        shapes: TensorShapes = {}
        width = self.width(hidden_size)
        for path, branch in self.branches().items():
            shapes |= under(path, branch.tensor_shapes(hidden_size)) | {f"{path}_norm.weight": (width,)}
        return shapes | linear("out_proj", hidden_size, width)
