"""The calls on which our kernels and those of other packages are compared, and one step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops import gated_delta_rule, gated_linear_attention, peers
from longrecall.ops.delta_rule.subheads import subhead_delta_rule

OPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gated_delta_rule": gated_delta_rule,
    "gated_linear_attention": gated_linear_attention,
    "subhead_delta_rule": subhead_delta_rule,
}
LAYERS = (1, 8)
"""Expansions E of the layers that are timed with peers' kernels as well."""
LAYER_PEERS = {"fla": "fla", "flash_qla": "FlashQLA"}
"""What `gpu_delta` calls the peers of layers."""


@dataclass(frozen=True)
class Case:
    """One call: `key_heads` keys, `heads` states a row, values of heads / subheads of them."""

    op: str
    decay: str
    rows: int
    length: int
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    subheads: int = 1

    @property
    def name(self) -> str:
        """What a row is called."""
        shape = f"{self.rows}x{self.length} {self.key_heads}/{self.heads} x ({self.key_width}, {self.value_width})"
        return f"{self.op}, decay {self.decay}, {shape}" + (f" E={self.subheads}" if self.subheads > 1 else "")

    @property
    def kind(self) -> tuple[Any, ...]:
        """What kernels are compiled for."""
        return (self.op, self.decay, self.key_heads, self.heads, self.key_width, self.value_width, self.subheads)

    def inputs(self, strong: bool = False) -> dict[str, Tensor]:
        """Random inputs in bfloat16, gates and state in float32; `strong`: decays from none to e^-20 a token."""
        g = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device="cuda")

        tokens = (self.rows, self.length)
        keys = (*tokens, self.key_heads, self.key_width)
        values = randn(*tokens, self.heads // self.subheads, self.value_width).bfloat16()
        found = {"q": randn(*keys).bfloat16(), "k": F.normalize(randn(*keys), dim=-1).bfloat16(), "v": values}
        if self.decay != "none":
            gates = randn(*(keys if self.decay == "channel" else (*tokens, self.heads)))
            mild = F.logsigmoid(gates) / 16
            found["log_decay"] = -(2 * gates - 3).exp().clamp(max=20) if strong else mild
        if "delta" in self.op:
            found["beta"] = torch.rand(*tokens, self.heads, generator=g, device="cuda")
        found["initial_state"] = randn(self.rows, self.heads, self.key_width, self.value_width)
        return found

    def call(self, tensors: dict[str, Tensor], backend: str | None) -> tuple[Tensor, Tensor]:
        """Outputs and final state; backend None = ours."""
        log_decay = tensors.get("log_decay")
        return OPS[self.op](**{**tensors, "log_decay": log_decay}, backend=backend)


DELTA, LINEAR = "gated_delta_rule", "gated_linear_attention"
CASES = (
    Case(DELTA, "head", 8, 4096, 8, 8, 128, 128),
    Case(DELTA, "head", 1, 4096, 8, 8, 128, 128),
    Case(DELTA, "head", 1, 32768, 8, 8, 128, 128),
    Case(DELTA, "head", 8, 4096, 64, 64, 128, 128),
    Case("subhead_delta_rule", "head", 8, 4096, 64, 64, 128, 128, 8),
    Case(DELTA, "head", 8, 4096, 16, 16, 64, 64),
    Case(DELTA, "none", 8, 4096, 8, 8, 128, 128),
    Case(LINEAR, "head", 8, 4096, 1, 64, 128, 64),
    Case(LINEAR, "channel", 8, 4096, 4, 4, 256, 512),
    Case(LINEAR, "channel", 1, 4096, 4, 4, 256, 512),
    Case(DELTA, "channel", 8, 4096, 8, 8, 128, 128),
)


def step(case: Case, backend: str | None, gradients: bool) -> Callable[[], Any]:
    """One forward without gradients, or forward and backward, of a case."""
    tensors = {name: x.requires_grad_(gradients) for name, x in case.inputs().items()}

    def forward() -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(gradients):
            return case.call(tensors, backend)

    if not gradients:
        return forward
    leaves, (out, final) = list(tensors.values()), forward()
    upstream = [torch.randn_like(out), torch.randn_like(final)]
    del out, final
    return lambda: torch.autograd.grad(forward(), leaves, upstream)


def layer_step(factor: int, backend: str, gradients: bool) -> Callable[[], Any]:
    """One forward without gradients, or forward and backward, of a layer with a peer's kernel."""
    import gpu_delta

    forward, leaves = gpu_delta.layer((8, 4096), factor, LAYER_PEERS[backend])

    def work() -> Any:
        with torch.set_grad_enabled(gradients):
            out = forward()
        return torch.autograd.grad(out, leaves, torch.randn_like(out)) if gradients else out

    for leaf in leaves:
        leaf.requires_grad_(gradients)
    return work


def served(case: Case) -> list[str]:
    """Peers that run here and know the op."""
    rule = DELTA if case.op == "subhead_delta_rule" else case.op
    here = {name: peer for name, peer in peers.PEERS.items() if peers.why_not_here(name) is None}
    return [name for name, peer in here.items() if (rule, case.decay) in peer.functions]
