"""The channel mixer beside a token mixer: SwiGLU, and the other MLPs that models have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.layers.projections import is_plain, project, project_biased
from longrecall.ops.norms.op import gated_projection, silu_product


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), ``[..., d]`` -> ``[..., d]``."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, {"gate": self.gate_proj, "up": self.up_proj}).values()
        return _down(gate, up, self.down_proj)


class MLP(nn.Module):
    """Every other MLP that `MLPConfig` describes, ``[..., d]`` -> ``[..., d]``."""

    def __init__(self, config: MLPConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        linear = partial(nn.Linear, bias=config.bias)
        self.gate_proj = linear(hidden_size, config.inner_size) if config.gated else None
        self.up_proj = linear(hidden_size, config.inner_size)
        self.down_proj = linear(config.inner_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        config, activation = self.config, ACTIVATIONS[self.config.activation]
        if self.gate_proj is None:
            y: Tensor = self.down_proj(activation(self.up_proj(x)))
        else:
            gate, up = self._gate_and_up(x, self.gate_proj)
            gate = gate if config.gate_multiplier == 1 else gate * config.gate_multiplier
            silu = config.activation == "silu"
            y = _down(gate, up, self.down_proj) if silu else self.down_proj(activation(gate) * up)
        return y if config.output_multiplier == 1 else y * config.output_multiplier

    def _gate_and_up(self, x: Tensor, gate_proj: nn.Module) -> tuple[Tensor, ...]:
        if self.config.bias:
            return project_biased(x, gate_proj, self.up_proj)
        return tuple(project(x, {"gate": gate_proj, "up": self.up_proj}).values())


def build_mlp(config: MLPConfig, hidden_size: int) -> SwiGLU | MLP:
    """The layer of a description."""
    return SwiGLU(hidden_size, config.inner_size) if config.is_swiglu else MLP(config, hidden_size)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": squared_relu,
}
"""The function of every name in `layers.descriptions.mlp.ACTIVATIONS`."""


def _down(gate: Tensor, up: Tensor, down_proj: nn.Module) -> Tensor:
    """silu(gate) * up through the last layer of an MLP."""
    if is_plain(down_proj):
        return gated_projection(gate, up, down_proj.get_parameter("weight"))
    projected: Tensor = down_proj(silu_product(gate, up))
    return projected
