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

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.errors import UserError, did_you_mean

MOST = 16
"""The largest expansion factor E, as far as the paper goes."""

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


@dataclass(frozen=True)
class ExpansionConfig:
    """How a mixer's queries and keys are widened; `kind` and `factor` decide, the rest has defaults.

    Raises:
        UserError: an unknown kind or activation, a factor outside 1..16, or a field that the kind has no use for.
    """

    kind: str
    """One of `EXPANDERS`."""
    factor: int
    """E: how many times as large the state becomes, 1 to 16. The paper's E = 1 is a mixer without expansion; a factor
    of 1 here still has the activation and the matrix of its kind."""
    activation: str | None = None
    """One of `ACTIVATIONS`; None = silu where the kind has a place for one."""
    subheads: bool = True
    """Cut the E * D channels of a head into E subheads of D."""
    rank: int | None = None
    """low_rank alone: width of the bottleneck; None = as many parameters as headwise, rounded down."""
    grafted: bool = False
    """headwise alone: the first subhead is the projected head as it is, and a learned scale weighs the outputs of the
    others. This is how surgery adds subheads to a trained layer without changing it."""

    def __post_init__(self) -> None:
        for name, value in (("kind", self.kind), ("activation", self.activation)):
            if not isinstance(value, str) and (name, value) != ("activation", None):
                raise UserError(f"expansion: {name} must be a name, got {value!r}")
        if self.kind not in EXPANDERS:
            hint = did_you_mean(str(self.kind), EXPANDERS)
            raise UserError(f'expansion: unknown kind "{self.kind}"; there are {", ".join(EXPANDERS)}.{hint}')
        if not isinstance(self.factor, int) or isinstance(self.factor, bool) or not 1 <= self.factor <= MOST:
            raise UserError(f"expansion: factor must be a whole number from 1 to {MOST}, got {self.factor!r}")
        for name in ("subheads", "grafted"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"expansion: {name} must be true or false, got {getattr(self, name)!r}")
        expander = EXPANDERS[self.kind]
        if expander is not None and expander.has_activation:
            if self.activation is None:
                object.__setattr__(self, "activation", "silu")
            if self.activation not in ACTIVATIONS:
                hint = did_you_mean(str(self.activation), ACTIVATIONS)
                known = ", ".join(ACTIVATIONS)
                raise UserError(f'expansion: unknown activation "{self.activation}"; there are {known}.{hint}')
        self._check_use()

    def _check_use(self) -> None:
        if self.activation is not None and self.kind in ("naive", "heads"):
            raise UserError(f'expansion: kind "{self.kind}" has no place for an activation; leave it away')
        if self.rank is not None and self.kind != "low_rank":
            raise UserError(f'expansion: rank belongs to kind "low_rank", not to "{self.kind}"; leave it away')
        if self.rank is not None and (not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1):
            raise UserError(f"expansion: rank must be a positive whole number, got {self.rank!r}")
        if self.kind == "dpfp" and self.factor % 2:
            raise UserError(f'expansion: kind "dpfp" makes 2, 4, 6, ... times as many channels, not {self.factor}')
        if self.kind == "heads" and not self.subheads:
            raise UserError('expansion: kind "heads" adds whole heads; leave subheads away')
        if self.grafted and (self.kind != "headwise" or not self.subheads or self.factor < 2):
            raise UserError('expansion: grafted needs kind "headwise" with at least 2 subheads')

    @classmethod
    def from_dict(cls, description: object) -> Self:
        """Build from plain data; raises UserError on an unknown or missing key, or a value that cannot be."""
        if not isinstance(description, dict):
            raise UserError(f'expansion must be a mapping such as {{"kind": "headwise", "factor": 4}}: {description!r}')
        known = [field.name for field in fields(cls)]
        for key in description:
            if key not in known:
                raise UserError(f'expansion has no field "{key}".{did_you_mean(str(key), known)}')
        for key in ("kind", "factor"):
            if key not in description:
                raise UserError(f'expansion needs "{key}", as in {{"kind": "headwise", "factor": 4}}')
        return cls(**description)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back; what the kind has no use for is left away."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        unused = {name for name in ("activation", "rank") if values[name] is None}
        unused |= set() if self.kind == "headwise" else {"grafted"}
        return {name: value for name, value in values.items() if name not in unused}

    @property
    def split(self) -> int:
        """Subheads of a head: E, or 1 without subheads (or with more whole heads)."""
        return self.factor if self.subheads and self.kind != "heads" else 1

    def build(self, heads: int, width: int, hidden_size: int) -> Expander:
        """The module for q or for k: `heads` heads of `width` D in a layer of width `hidden_size`."""
        expander = EXPANDERS[self.kind]
        if expander is None:
            raise TypeError(f'an expansion of kind "{self.kind}" has no module: build a mixer with more heads')
        return expander(self, heads, width, hidden_size)


def default_rank(width: int, factor: int) -> int:
    """The largest rank at which low_rank has no more parameters than headwise: r * (1 + E) <= E * D."""
    return max(1, math.floor(factor * width / (factor + 1)))
