"""HGRN2 (Qin et al. 2024): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, convolution, linear

BOUNDS = "lower_bounds"
"""Under which a layer gives the lower bounds of all layers ``[rows, H * K]`` to later ones."""


@dataclass(frozen=True)
class HGRN2Config(MixerConfig):
    """Sizes of an HGRN2 layer; the published models have key_dim 128 and H * V = H * K = hidden_size."""

    type: ClassVar[str] = "hgrn2"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.hgrn2:HGRN2"
    optional_fields: ClassVar[tuple[str, ...]] = ("conv_activation", "bound_rows", "bound_row")

    num_heads: int
    """Heads H."""
    key_dim: int
    """Key width K of one head: the factor by which the state is larger than HGRN's."""
    value_dim: int
    """Value width V of one head."""
    lower_bound: float = 0.0
    """The forget gate never falls below it; a model gives its upper layers larger ones (they remember longer)."""
    conv_width: int = 0
    """Width of the short convolutions on queries, forget gates and values; 0 = none (SiLU alone on the queries)."""
    norm_eps: float = 1e-5
    conv_activation: str | None = "silu"
    """After the convolutions: "silu", or None, which leaves one SiLU, that on the queries."""
    bound_rows: int | None = None
    """Rows of the table of learned lower bounds that this layer holds and gives to later ones; None = it holds none.

    The published models learn a row for each layer: the bounds of a layer are the sum of the softmax of the table over
    its rows up to that layer, without the first.
    """
    bound_row: int | None = None
    """The row of that table whose bounds stand in the place of `lower_bound`; None = none."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "key_dim", "value_dim")
        bound = self.lower_bound
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0.0 <= bound < 1.0:
            raise UserError(f'mixer "{self.type}": lower_bound must be a number from 0 up to but not 1, got {bound!r}')
        if self.conv_activation not in (None, "silu"):
            raise UserError(f'mixer "{self.type}": conv_activation must be silu or null, got {self.conv_activation!r}')
        for name in ("bound_rows", "bound_row"):
            if getattr(self, name) is not None:
                self._require_positive(name)

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The table of lower bounds, where another layer holds it."""
        return () if self.bound_row is None or self.bound_rows is not None else (BOUNDS,)

    @property
    def gives(self) -> tuple[str, ...]:  # type: ignore[override]
        """The table of lower bounds, where this layer holds it."""
        return () if self.bound_rows is None else (BOUNDS,)

    def state_shapes(self) -> StateShapes:
        shapes: StateShapes = {"recurrent": (self.num_heads, self.key_dim, self.value_dim)}
        if self.conv_width:
            keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
            shapes |= {
                f"{name}_conv": (size, self.conv_width - 1) for name, size in (("q", keys), ("f", keys), ("i", values))
            }
        return shapes

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        sizes = {"q": keys, "f": keys, "i": values}
        shapes: TensorShapes = {} if self.bound_rows is None else {"bounds": (self.bound_rows, keys)}
        for name, size in sizes.items():
            shapes |= linear(f"{name}_proj", size, hidden_size)
        for name, size in sizes.items():
            shapes |= convolution(f"{name}_conv", size, self.conv_width)
        return shapes | {"o_norm.weight": (values,)} | linear("o_proj", hidden_size, values)
