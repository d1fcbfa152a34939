"""How queries and keys are widened for a larger state: what layers/expansion.py builds, by name and sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Self

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import TensorShapes, linear

KINDS = ("headwise", "low_rank", "dpfp", "lfm", "naive", "heads")
ACTIVATIONS = ("silu", "relu", "1+elu", "identity")
"""What a projected head goes through before it is expanded (the paper, section 4.3 and table 7)."""

WITHOUT_ACTIVATION = ("naive", "heads")
"""Kinds without a place between the projection and the expansion."""

MOST = 16
"""The largest expansion factor E, as far as the paper goes."""


@dataclass(frozen=True)
class ExpansionConfig:
    """How a mixer's queries and keys are widened; `kind` and `factor` decide, the rest has defaults.

    Raises:
        UserError: an unknown kind or activation, a factor outside 1..16, or a field that the kind has no use for.
    """

    kind: str
    """One of `KINDS`."""
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
        if self.kind not in KINDS:
            hint = did_you_mean(str(self.kind), KINDS)
            raise UserError(f'expansion: unknown kind "{self.kind}"; there are {", ".join(KINDS)}.{hint}')
        if not isinstance(self.factor, int) or isinstance(self.factor, bool) or not 1 <= self.factor <= MOST:
            raise UserError(f"expansion: factor must be a whole number from 1 to {MOST}, got {self.factor!r}")
        for name in ("subheads", "grafted"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"expansion: {name} must be true or false, got {getattr(self, name)!r}")
        if self.kind not in WITHOUT_ACTIVATION:
            if self.activation is None:
                object.__setattr__(self, "activation", "silu")
            if self.activation not in ACTIVATIONS:
                hint = did_you_mean(str(self.activation), ACTIVATIONS)
                known = ", ".join(ACTIVATIONS)
                raise UserError(f'expansion: unknown activation "{self.activation}"; there are {known}.{hint}')
        self._check_use()

    def _check_use(self) -> None:
        if self.activation is not None and self.kind in WITHOUT_ACTIVATION:
            raise UserError(f'expansion: kind "{self.kind}" has no place for an activation; leave it out')
        if self.rank is not None and self.kind != "low_rank":
            raise UserError(f'expansion: rank belongs to kind "low_rank", not to "{self.kind}"; leave it out')
        if self.rank is not None and (not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1):
            raise UserError(f"expansion: rank must be a positive whole number, got {self.rank!r}")
        if self.kind == "dpfp" and self.factor % 2:
            raise UserError(f'expansion: kind "dpfp" makes 2, 4, 6, ... times as many channels, not {self.factor}')
        if self.kind == "heads" and not self.subheads:
            raise UserError('expansion: kind "heads" adds whole heads; leave subheads out')
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

    def tensor_shapes(self, heads: int, width: int, hidden_size: int) -> TensorShapes:
        """Tensors of the expansion of q or of k: `heads` H of `width` D in a layer of width `hidden_size`."""
        if self.kind == "headwise":
            made = self.factor - 1 if self.grafted else self.factor
            return {"weight": (heads, width, made * width)}
        if self.kind == "low_rank":
            rank = self.rank or default_rank(width, self.factor)
            return linear("down", rank, heads * width) | linear("up", heads * self.factor * width, rank)
        return linear("proj", heads * self.factor, hidden_size) if self.kind == "lfm" else {}


def default_rank(width: int, factor: int) -> int:
    """The largest rank at which low_rank has no more parameters than headwise: r * (1 + E) <= E * D."""
    return max(1, math.floor(factor * width / (factor + 1)))
