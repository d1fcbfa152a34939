"""The channel mixer beside a token mixer, a multilayer perceptron: its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
"""Names as transformers has them; "relu2" is the square of "relu"."""
OTHER_NAMES = {"swish": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Other names of the same functions."""


@dataclass(frozen=True)
class MLPConfig(MixerConfig):
    """Sizes of an MLP; with its defaults it is SwiGLU.

    down(activation(gate_multiplier * gate(x)) * up(x)) * output_multiplier, or down(activation(up(x))) without a gate.
    """

    type: ClassVar[str] = "mlp"
    layer_class: ClassVar[str] = "longrecall.layers.mlp:build_mlp"
    optional_fields: ClassVar[tuple[str, ...]] = (
        "gated",
        "activation",
        "bias",
        "gate_multiplier",
        "output_multiplier",
    )
    positionwise: ClassVar[bool] = True

    inner_size: int
    """Inner width I."""
    gated: bool = True
    """Whether a gate multiplies the inner channels."""
    activation: str = "silu"
    """Of the gate, or without one of the inner channels: one of `ACTIVATIONS`."""
    bias: bool = False
    """Biases of all projections."""
    gate_multiplier: float = 1.0
    """What the gate is multiplied with before its activation (Falcon-H1)."""
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        self._require_positive("inner_size")
        object.__setattr__(self, "activation", checked_activation(self.type, self.activation))
        if not self.gated and self.gate_multiplier != 1:
            raise UserError(f'mixer "{self.type}": gate_multiplier needs a gate, but "gated" is false')

    @property
    def is_swiglu(self) -> bool:
        """Whether this is a plain SwiGLU, for which there are faster paths."""
        return self == MLPConfig(self.inner_size)

    def state_shapes(self) -> StateShapes:
        return {}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        shapes = linear("gate_proj", self.inner_size, hidden_size, bias=self.bias) if self.gated else {}
        shapes |= linear("up_proj", self.inner_size, hidden_size, bias=self.bias)
        return shapes | linear("down_proj", hidden_size, self.inner_size, bias=self.bias)


def checked_activation(kind: str, name: str) -> str:
    """The name of an activation as `ACTIVATIONS` has it.

    Raises:
        UserError: there is no such activation; `kind`, the type of the description, is named.
    """
    known = OTHER_NAMES.get(name, name)
    if known not in ACTIVATIONS:
        raise UserError(
            f'mixer "{kind}": activation must be one of {", ".join(ACTIVATIONS)}, got {name!r}.'
            f"{did_you_mean(str(name), ACTIVATIONS)}"
        )
    return known
