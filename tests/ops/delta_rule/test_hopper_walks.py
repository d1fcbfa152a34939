"""The gated delta rule's walks in Gluon, run on the CPU: against formulas in float64.

What the walks take, and the formulas, serve tests/ops/delta_rule/test_gpu_delta_walks_hopper.py as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from longrecall.ops.delta_rule.triton.plan import Plan, plan_of
from tests.ops.delta_rule.test_hopper_inverse import expected
from tests.ops.gluon_emulation import load

CHUNK, WIDTH, SCALE = 64, 128, 0.09

TOLERANCE = 8e-3
"""Operands and the results themselves are rounded to bfloat16, each by up to 2^-9 = 2e-3."""


@dataclass(frozen=True)
class Call:
    """Tensors of a call."""

    inputs: tuple[Any, ...]
    """q, k, v, log decay, beta, weights, and state or None: zeros, whose gradient nobody wants."""
    solved: tuple[Tensor, Tensor]
    """The inverses ``[B, H, chunks * C, C]`` and the cumulative log decays ``[B, H, chunks * C]``."""
    d_out: Tensor
    d_final: Tensor | None

    @property
    def plan(self) -> Plan:
        q, _, v, _, beta, _, _ = self.inputs
        return plan_of(q, v, beta, SCALE)

    def ends(self, state: bool, d_final: bool) -> tuple[Call, Call]:
        """The call with zeros for the ends asked for, and with None."""
        zeros = torch.zeros(self.plan.states, device=self.d_out.device)
        *inputs, given = self.inputs

        def call(absent: Tensor | None) -> Call:
            ends = absent if state else given, absent if d_final else self.d_final
            return replace(self, inputs=(*inputs, ends[0]), d_final=ends[1])

        return call(zeros), call(None)


@dataclass(frozen=True)
class Case:
    """Sizes of a call; `fade` multiplies the log decays."""

    rows: int
    length: int
    value_heads: int
    subheads: int = 1
    repeats: int = 1
    fade: float = 1.0

    def call(self, device: str) -> Call:
        """What the walks take of such sizes, drawn at random."""
        generator = torch.Generator().manual_seed(self.length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        B, T, Hv = self.rows, self.length, self.value_heads
        heads = Hv * self.subheads
        keys = (B, T, heads // self.repeats, WIDTH)
        q, k = (F.normalize(normal(*keys), dim=-1).bfloat16() for _ in range(2))
        gates = (-F.softplus(normal(B, T, heads) - 2) * self.fade, normal(B, T, heads).sigmoid())
        tensors = (q, k, normal(B, T, Hv, WIDTH).bfloat16(), *gates, 1 + 0.2 * normal(Hv, self.subheads))
        states = [0.3 * normal(B, heads, WIDTH, WIDTH) for _ in range(2)]
        P, G = expected(k, *gates)
        solved = (P.bfloat16().flatten(2, 3).contiguous(), G.float().flatten(2).contiguous())
        return Call((*tensors, states[0]), solved, normal(B, T, Hv, WIDTH).bfloat16(), states[1])


def walked(call: Call, module: Any) -> dict[str, Tensor]:
    """All results of the three walks of hopper/walks.py, in rooms full of NaN: every number must be written.

    Without the initial state there is no gradient of it.
    """
    (q, k, v, _, beta, weights, state), (inverse, cumulative), plan = call.inputs, call.solved, call.plan

    def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(shape, float("nan"), device=q.device, dtype=dtype)

    heads = (plan.rows, plan.heads)
    found = {
        "out": room(plan.subheads, *v.shape),
        "final": room(*plan.states, dtype=torch.float32),
        **{name: room(*heads, plan.chunks, WIDTH, WIDTH) for name in ("states", "d_states")},
        **{name: room(*heads, plan.chunks * CHUNK, WIDTH) for name in ("corrections", "d_targets")},
    }
    if state is not None:
        found["d_initial"] = room(*plan.states, dtype=torch.float32)
    given = (q, k, v, beta, weights, cumulative, inverse, state)
    module.walk(plan, (*given, found["out"], found["final"], beta, beta), read=True)
    module.walk(plan, (*given, beta, beta, found["states"], found["corrections"]), read=False)
    back = (found.get("d_initial"), found["d_states"], found["d_targets"])
    ends = (call.d_out, call.d_final)
    module.walk_back(plan, (q, k, beta, weights, cumulative, inverse, *ends, *back))
    return found


def formulas(case: Case, call: Call) -> dict[str, Tensor]:
    """The same in float64, chunk by chunk."""
    plan, d_out = call.plan, call.d_out
    q, k, v, _, beta, weights, S = (x.double() for x in call.inputs)
    P, G = (x.double().unflatten(2, (plan.chunks, CHUNK)) for x in call.solved)
    G = G[..., None]
    head = torch.arange(plan.heads, device=q.device)
    group = head // case.repeats
    value_head, sub = group // case.subheads * case.repeats + head % case.repeats, group % case.subheads

    def chunks_of(x: Tensor, heads: Tensor) -> Tensor:
        padded = F.pad(x.double(), (0, 0, 0, 0, 0, plan.chunks * CHUNK - case.length))
        return padded[:, :, heads].unflatten(1, (plan.chunks, CHUNK)).permute(0, 3, 1, 2, 4)

    Q, K, V, d_O = (chunks_of(x, h) for x, h in ((q, group), (k, group), (v, value_head), (d_out, value_head)))
    strength, last = chunks_of(beta[..., None], head), G[..., -1:, :]
    factor = (SCALE * weights[value_head, sub])[:, None, None]
    scores = Q @ K.mT * (G - G.mT).tril().exp().tril()
    states, corrections, outputs = [], [], []
    for n in range(plan.chunks):
        states.append(S)
        start = G[:, :, n].exp()
        U = P[:, :, n] @ (strength[:, :, n] * (V[:, :, n] - start * (K[:, :, n] @ S)))
        corrections.append(U)
        outputs.append(factor * (scores[:, :, n] @ U + Q[:, :, n] @ S * start))
        S = S * last[:, :, n].exp() + K[:, :, n].mT @ (U * (last - G)[:, :, n].exp())
    d_S, d_states, d_targets = call.d_final.double(), [], []
    for n in reversed(range(plan.chunks)):
        d_states.append(d_S)
        start, d_o = G[:, :, n].exp(), d_O[:, :, n] * factor
        d_U = scores[:, :, n].mT @ d_o + K[:, :, n] @ d_S * (last - G)[:, :, n].exp()
        d_X = P[:, :, n].mT @ d_U
        d_targets.append(d_X)
        d_S = (
            d_S * last[:, :, n].exp()
            + Q[:, :, n].mT @ (d_o * start)
            - K[:, :, n].mT @ (d_X * start * strength[:, :, n])
        )
    out = Q.new_zeros(case.subheads, *v.shape)
    out[sub, :, :, value_head] = torch.cat(outputs, 2)[:, :, : case.length].transpose(0, 1)
    return {
        "out": out, "final": S, "states": torch.stack(states, 2), "corrections": torch.cat(corrections, 2),
        "d_states": torch.stack(d_states[::-1], 2), "d_targets": torch.cat(d_targets[::-1], 2), "d_initial": d_S,
    }  # fmt: skip


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """‖found - wanted‖ / ‖wanted‖ of each result."""
    return {name: ((found[name].double() - x.double()).norm() / x.double().norm()).item() for name, x in wanted.items()}


CASES = [
    Case(1, 64, 1),
    Case(2, 1, 1, subheads=2),
    Case(1, 63, 2, subheads=2),
    Case(1, 65, 2, repeats=2, fade=50.0),
    Case(2, 130, 4, subheads=2, repeats=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_equal_the_formulas(case: Case) -> None:
    call = case.call("cpu")
    found = errors(walked(call, load("delta_rule.hopper.walks")), formulas(case, call))
    assert all(error < TOLERANCE for error in found.values()), found


ENDS = [(True, True), (True, False), (False, True)]
"""Without an initial state, without a gradient of the final one."""


@pytest.mark.parametrize(("state", "d_final"), ENDS)
def test_an_end_that_is_not_there_counts_as_zeros(state: bool, d_final: bool) -> None:
    calls = Case(1, 65, 2, subheads=2).call("cpu").ends(state, d_final)
    wanted, found = (walked(call, load("delta_rule.hopper.walks")) for call in calls)
    assert wanted.keys() - found.keys() == ({"d_initial"} if state else set())
    for name, x in found.items():
        assert torch.equal(x, wanted[name]), name
