"""Wider queries and keys for a larger state: head-wise expansion with subheads, and its alternatives.

Source: "Scaling up the State Size of RNN LLMs for Long-Context Scenarios" (below: the paper), sections 4.1 to 4.3 and
tables 1, 7 and 8. A head's projected query or key y of D numbers becomes E * D numbers,

    headwise    act(y) W_i, one matrix W_i [D, E*D] per head i (equation 8)          E * D * D parameters a head
    low_rank    act(y of all heads) through rank r to all heads' E * D               r * H * D * (1 + E) in all
    dpfp        products of rectified neighbours (Schlag et al. 2021), E even        none
    lfm         outer product of y with E rectified projections of x                 H * E * d in all
    naive       the projection itself is E times as wide                             E times W_q
    heads       E times as many whole heads, values and all                          E times the mixer (table 8)

and is cut into E subheads of D (equation 9), each with its own convolution, feature map, decay and beta; the values are
shared and the outputs of a head's subheads added up (equation 10). Without subheads the head stays one, E * D wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.expansion import ExpansionConfig, default_rank

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "1+elu": lambda y: 1.0 + F.elu(y),
    "identity": lambda y: y,
}
"""What a projected head goes through before it is expanded (the paper, section 4.3 and table 7)."""


class Expander(nn.Module):
    """Base of the expansions: ``expand(y, x)`` makes ``[B, T, H, E * D]`` of y ``[B, T, H, D]`` and the layer's x."""

    reads_input: ClassVar[bool] = False
    """Whether the layer's input is read beside the projection."""
    has_activation: ClassVar[bool] = True
    """Whether the kind has a place between the projection and the expansion."""

    def __init__(self, config: ExpansionConfig, heads: int, width: int, hidden_size: int) -> None:
        super().__init__()
        self.factor, self.heads = config.factor, heads
        self.activation = ACTIVATIONS[config.activation or "identity"]

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """y ``[B, T, H, D]``, x ``[B, T, d]`` -> ``[B, T, H, E * D]``."""
        return self.expand(self.activation(y), x)

    def expand(self, y: Tensor, x: Tensor) -> Tensor:
        """The same, after the activation."""
        return y


class NaiveExpansion(Expander):
    """The projection is E times as wide by itself; nothing is left to do (table 1, "naive")."""

    has_activation = False


class HeadwiseExpansion(Expander):
    """One matrix per head (equation 8). Grafted, y itself stays the first subhead and the matrix makes the others."""

    def __init__(self, config: ExpansionConfig, heads: int, width: int, hidden_size: int) -> None:
        super().__init__(config, heads, width, hidden_size)
        self.grafted = config.grafted
        made = config.factor - 1 if config.grafted else config.factor
        self.weight = nn.Parameter(torch.empty(heads, width, made * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within D ** -0.5, the default of a linear layer with D inputs."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        made: Tensor = torch.einsum("bthd,hde->bthe", self.activation(y), self.weight)
        return torch.cat([y, made], dim=-1) if self.grafted else made


class LowRankExpansion(Expander):
    """All heads together through a bottleneck (table 7, "Low Rank"; the paper does not say which rank)."""

    def __init__(self, config: ExpansionConfig, heads: int, width: int, hidden_size: int) -> None:
        super().__init__(config, heads, width, hidden_size)
        rank = config.rank or default_rank(width, config.factor)
        self.down = nn.Linear(heads * width, rank, bias=False)
        self.up = nn.Linear(rank, heads * config.factor * width, bias=False)

    def expand(self, y: Tensor, x: Tensor) -> Tensor:
        wide: Tensor = self.up(self.down(y.flatten(-2))).unflatten(-1, (self.heads, -1))
        return wide


class ProductExpansion(Expander):
    """DPFP (Schlag et al. 2021, equation 37): r_i * r_(i+j), r = relu([y, -y]), i + j around the corner, j = 1..E/2."""

    def expand(self, y: Tensor, x: Tensor) -> Tensor:
        # Two copies of D channels a product: E / 2 products make E * D.
        rectified = F.relu(torch.cat([y, -y], dim=-1))
        products = [rectified * rectified.roll(-j, dims=-1) for j in range(1, self.factor // 2 + 1)]
        return torch.cat(products, dim=-1)


class OuterProductExpansion(Expander):
    """LFM (Pramanik et al. 2024, AGaLiTe): subhead j of head i is relu(w_ij . x) * y_i."""

    reads_input = True

    def __init__(self, config: ExpansionConfig, heads: int, width: int, hidden_size: int) -> None:
        super().__init__(config, heads, width, hidden_size)
        self.proj = nn.Linear(hidden_size, heads * config.factor, bias=False)

    def expand(self, y: Tensor, x: Tensor) -> Tensor:
        weights: Tensor = F.relu(self.proj(x)).unflatten(-1, (self.heads, -1))
        return (weights[..., None] * y[..., None, :]).flatten(-2)


EXPANDERS: dict[str, type[Expander] | None] = {
    "headwise": HeadwiseExpansion,
    "low_rank": LowRankExpansion,
    "dpfp": ProductExpansion,
    "lfm": OuterProductExpansion,
    "naive": NaiveExpansion,
    "heads": None,
}
"""Every kind and the module between projection and convolution; None = there is none (the mixer has more heads)."""


def build_expander(config: ExpansionConfig, heads: int, width: int, hidden_size: int) -> Expander:
    """The module for q or for k: `heads` heads of `width` D in a layer of width `hidden_size`."""
    expander = EXPANDERS[config.kind]
    if expander is None:
        raise TypeError(f'an expansion of kind "{config.kind}" has no module: build a mixer with more heads')
    return expander(config, heads, width, hidden_size)
