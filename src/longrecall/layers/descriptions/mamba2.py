"""Mamba-2 (Dao and Gu 2024): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import (
    CONV_ACTIVATIONS,
    MixerConfig,
    StateShapes,
    TensorShapes,
    convolution,
    linear,
)

NORMS = ("after_gate", "before_gate", "none")
"""Where the norm of the output stands: norm(y * silu(z)), norm(y) * silu(z), or y * silu(z) without one."""

PARTS = ("z", "x", "B", "C", "dt")
"""The parts of the one projection, in the order of its rows."""

_NO_LIMIT = 1e18
"""A time step is never as long: every upper limit from here on means that there is none."""


@dataclass(frozen=True)
class Mamba2Config(MixerConfig):
    """Sizes of a Mamba-2 layer."""

    type: ClassVar[str] = "mamba2"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.mamba2:Mamba2"
    optional_fields: ClassVar[tuple[str, ...]] = ("gated_norm", "out_bias", "conv_activation", "part_multipliers")

    inner_dim: int
    """Width I of x and of the gate z; expand * hidden_size in the published models."""
    head_dim: int
    """Value width P of one head; I / P heads."""
    state_dim: int
    """Key width N (d_state)."""
    groups: int = 1
    """Groups G of heads that share B and C."""
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_limit: tuple[float, float | None] = (0.0, None)
    """Smallest and largest time step after the softplus; None = no upper limit, as is read from 1e18 on."""
    norm_eps: float = 1e-5
    gated_norm: str = "after_gate"
    """Where the norm of the output stands, one of `NORMS`; it has an rms for each group."""
    out_bias: bool | None = None
    """Whether the output projection has a bias; None = as `proj_bias` says, which then speaks of the first alone."""
    conv_activation: str = "silu"
    """What follows the convolution, one of `CONV_ACTIVATIONS`."""
    part_multipliers: tuple[float, ...] = (1.0,) * len(PARTS)
    """Factors of the projected `PARTS`, before the convolution (Falcon-H1)."""

    def __post_init__(self) -> None:
        self._require_positive("inner_dim", "head_dim", "state_dim", "groups", "conv_width")
        self._require_one_of("gated_norm", NORMS)
        self._require_one_of("conv_activation", CONV_ACTIVATIONS)
        if self.out_bias == self.proj_bias:
            object.__setattr__(self, "out_bias", None)
        factors = tuple(float(factor) for factor in self.part_multipliers)
        if len(factors) != len(PARTS):
            raise UserError(
                f'mixer "mamba2": part_multipliers must be {len(PARTS)} numbers, for {", ".join(PARTS)}, '
                f"got {list(factors)}"
            )
        object.__setattr__(self, "part_multipliers", factors)
        self._require_multiple("inner_dim", "head_dim")
        self._require_multiple("num_heads", "groups")
        low, high = self.time_step_limit
        # Compared before it is converted: a whole number may be larger than any float.
        limits = (float(low), None if high is None or high >= _NO_LIMIT else float(high))
        object.__setattr__(self, "time_step_limit", limits)

    @property
    def num_heads(self) -> int:
        """Value heads, I / P."""
        return self.inner_dim // self.head_dim

    @property
    def has_out_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.proj_bias if self.out_bias is None else self.out_bias

    def state_shapes(self) -> StateShapes:
        channels = self.inner_dim + 2 * self.groups * self.state_dim
        return {"recurrent": (self.num_heads, self.state_dim, self.head_dim), "conv": (channels, self.conv_width - 1)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        inner, heads, convolved = self.inner_dim, self.num_heads, self.inner_dim + 2 * self.groups * self.state_dim
        return {
            **{name: (heads,) for name in ("dt_bias", "A_log", "D")},
            **linear("in_proj", inner + convolved + heads, hidden_size, bias=self.proj_bias),
            **convolution("conv", convolved, self.conv_width, bias=self.conv_bias),
            **({} if self.gated_norm == "none" else {"norm.weight": (inner,)}),
            **linear("out_proj", hidden_size, inner, bias=self.has_out_bias),
        }
