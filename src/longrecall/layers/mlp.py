"""The channel mixer beside most token mixers."""

from __future__ import annotations

from torch import Tensor, nn

from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.layers.projections import is_plain, project
from longrecall.ops.norms.op import gated_projection, silu_product


def build_mlp(config: MLPConfig, hidden_size: int) -> nn.Module:
    """The MLP that `config` describes, in a stream of `hidden_size` channels."""
    return SwiGLU(hidden_size, config.inner_size)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), ``[..., d]`` -> ``[..., d]``."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, {"gate": self.gate_proj, "up": self.up_proj}).values()
        if is_plain(self.down_proj):
            return gated_projection(gate, up, self.down_proj.weight)
        gated: Tensor = self.down_proj(silu_product(gate, up))
        return gated
