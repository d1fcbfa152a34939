"""Attention and an MLP in front of a mixer, with weights that several layers share (Zamba2, Glorioso et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.descriptions.base import MixerConfig, TensorShapes, linear, under
from longrecall.layers.descriptions.branches import BranchesConfig
from longrecall.layers.descriptions.mlp import checked_activation


@dataclass(frozen=True)
class SharedBlockConfig(BranchesConfig):
    """A block of attention and an MLP that reads the stream beside the embeddings, and a mixer that reads both.

    The norm is inside: the layer's block has none. Of the tensors, those under ``shared.`` are of the first layer that
    uses them; a later one says with `weights_of` which layer that is. All others are its own.
    """

    type: ClassVar[str] = "shared_block"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.shared_block:SharedBlock"
    nested: ClassVar[tuple[str, ...]] = ("attention", "mixer")
    takes: ClassVar[tuple[str, ...]] = ("embedded",)

    attention: MixerConfig
    """Of type "attention"; `input_size` is twice the model's width."""
    mixer: MixerConfig
    """What the layer adds to the stream: a mixer that reads the stream plus what the shared block returns."""
    mlp_size: int
    """Inner width I of the shared MLP, which has a gate."""
    activation: str = "gelu"
    """Of the gate, named as that of an `mlp`."""
    bias: bool = False
    """Biases of the shared MLP."""
    adapter_rank: int = 0
    """Rank of the layer's own adapter of the first projections of the MLP; 0 = none."""
    attention_adapters: bool = False
    """Whether queries, keys and values have adapters of that rank, too."""
    norm_eps: float = 1e-5
    weights_of: int | None = None
    """The layer that has the shared weights; None = this one."""

    def __post_init__(self) -> None:
        self._require_positive("mlp_size")
        object.__setattr__(self, "activation", checked_activation(self.type, self.activation))
        if not isinstance(self.attention, AttentionConfig):
            raise UserError(f'mixer "{self.type}": attention must be of type "attention", got {self.attention!r}')
        if not isinstance(self.mixer, MixerConfig) or self.mixer.positionwise:
            raise UserError(f'mixer "{self.type}": mixer must be the description of a token mixer, got {self.mixer!r}')
        if self.adapter_rank < 0:
            raise UserError(f'mixer "{self.type}": adapter_rank must be a whole number >= 0, got {self.adapter_rank!r}')
        if self.attention_adapters and not self.adapter_rank:
            raise UserError(f'mixer "{self.type}": attention_adapters need an adapter_rank above 0')

    @property
    def lender(self) -> int | None:
        return self.weights_of

    def lends_to(self, other: MixerConfig) -> bool:
        if not isinstance(other, SharedBlockConfig) or self.weights_of is not None:
            return False
        # Each layer has its own mixer and adapters.
        alike = replace(
            other,
            weights_of=None,
            mixer=self.mixer,
            adapter_rank=self.adapter_rank,
            attention_adapters=self.attention_adapters,
        )
        return alike == self

    def check_hidden_size(self, hidden_size: int) -> None:
        found = getattr(self.attention, "input_size", None)
        if found != 2 * hidden_size:
            raise UserError(
                f'mixer "{self.type}": its attention reads the stream and the embeddings, so its input_size must be '
                f"{2 * hidden_size}, got {found}"
            )

    def adapters(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Name of each of the layer's own adapters -> channels that go in and out."""
        found = {}
        if self.attention_adapters:
            shapes = self.attention.tensor_shapes(hidden_size)
            found = {f"{name}_adapter": shapes[f"{name}_proj.weight"][::-1] for name in "qkv"}
        if self.adapter_rank:
            found["mlp_adapter"] = (hidden_size, 2 * self.mlp_size)
        return {name: (sizes[0], sizes[1]) for name, sizes in found.items()}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        self.check_hidden_size(hidden_size)
        shapes: TensorShapes = {}
        if self.weights_of is None:
            shared = {
                "norm.weight": (2 * hidden_size,),
                **under("attention", self.attention.tensor_shapes(hidden_size)),
                "mlp_norm.weight": (hidden_size,),
                **linear("gate_up_proj", 2 * self.mlp_size, hidden_size, bias=self.bias),
                **linear("down_proj", hidden_size, self.mlp_size, bias=self.bias),
            }
            shapes |= under("shared", shared)
        for name, (width, out) in self.adapters(hidden_size).items():
            shapes |= linear(f"{name}.0", self.adapter_rank, width) | linear(f"{name}.1", out, self.adapter_rank)
        shapes |= linear("out_proj", hidden_size, hidden_size) | {"norm.weight": (hidden_size,)}
        return shapes | under("mixer", self.mixer.tensor_shapes(hidden_size))
