"""Attention and a recurrent mixer side by side, added up (Falcon-H1, Zuo et al. 2025): branches and factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, TensorShapes, under
from longrecall.layers.descriptions.branches import BranchesConfig


@dataclass(frozen=True)
class ParallelConfig(BranchesConfig):
    """Two mixers of any type that read the same input; their outputs are added up."""

    type: ClassVar[str] = "parallel"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.parallel:Parallel"
    nested: ClassVar[tuple[str, ...]] = ("attention", "ssm")
    optional_fields: ClassVar[tuple[str, ...]] = (
        "attention_input_multiplier",
        "attention_output_multiplier",
        "ssm_input_multiplier",
        "ssm_output_multiplier",
    )

    attention: MixerConfig
    """The attention heads."""
    ssm: MixerConfig
    """The recurrent heads."""
    attention_input_multiplier: float = 1.0
    """Factor of what the attention reads."""
    attention_output_multiplier: float = 1.0
    ssm_input_multiplier: float = 1.0
    ssm_output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        for path in self.nested:
            branch = getattr(self, path)
            if not isinstance(branch, MixerConfig):
                raise UserError(f'mixer "parallel": {path} must be a mixer description, got {branch!r}')
            if branch.positionwise:
                raise UserError(
                    f'mixer "parallel": {path} is "{branch.type}", which mixes no tokens; give it a block of its own'
                )

    def factors(self, path: str) -> tuple[float, float]:
        """The factors of a branch's input and of its output."""
        return getattr(self, f"{path}_input_multiplier"), getattr(self, f"{path}_output_multiplier")

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        shapes: TensorShapes = {}
        for path, branch in self.branches().items():
            shapes |= under(path, branch.tensor_shapes(hidden_size))
        return shapes
