"""The gated delta rule's walks in Gluon on a Hopper GPU, against formulas in float64 and the plain kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from longrecall.ops.triton import delta_rule, hopper
from longrecall.ops.triton.hopper import walks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.declines(torch.zeros(1, device="cuda").bfloat16()) is not None,
        reason="needs a Hopper GPU and the Triton that the kernels are written for",
    ),
]

CHUNK, WIDTH, SCALE = 64, 128, 0.09

TOLERANCE = 8e-3
"""Operands and the results themselves are rounded to bfloat16, each by up to 2^-9 = 2e-3."""


@dataclass(frozen=True)
class Case:
    """Sizes of a call; `fade` multiplies the log decays."""

    rows: int
    length: int
    value_heads: int
    subheads: int = 1
    repeats: int = 1
    fade: float = 1.0

    def inputs(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """q, k, v, log decay, beta, weights, state; gradients of outputs and final state."""
        generator = torch.Generator("cuda").manual_seed(self.length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        B, T, Hv = self.rows, self.length, self.value_heads
        heads = Hv * self.subheads
        keys = (B, T, heads // self.repeats, WIDTH)
        q, k = (F.normalize(normal(*keys), dim=-1).bfloat16() for _ in range(2))
        gates = (-F.softplus(normal(B, T, heads) - 2) * self.fade, normal(B, T, heads).sigmoid())
        tensors = (q, k, normal(B, T, Hv, WIDTH).bfloat16(), *gates, 1 + 0.2 * normal(Hv, self.subheads))
        states = [0.3 * normal(B, heads, WIDTH, WIDTH) for _ in range(2)]
        return (*tensors, states[0]), normal(B, T, Hv, WIDTH).bfloat16(), states[1]


CASES = [
    Case(1, 64, 1),
    Case(1, 1, 2, subheads=2),
    Case(2, 333, 3),
    Case(1, 130, 8, subheads=8, fade=50.0),
    Case(2, 200, 8, subheads=4, repeats=2),
    # Two programs for every multiprocessor and more.
    Case(3, 500, 12, subheads=8),
]


def walked(case: Case) -> dict[str, Tensor]:
    """All results of the three walks, in rooms full of NaN: every number must be written."""
    (q, k, v, log_decay, beta, weights, state), d_out, d_final = case.inputs()
    plan = delta_rule._plan(q, v, beta, SCALE)
    inverse, cumulative = delta_rule._invert(plan, k, log_decay, beta)

    def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(shape, float("nan"), device="cuda", dtype=dtype)

    heads = (plan.rows, plan.heads)
    found = {
        "out": room(plan.subheads, *v.shape),
        "final": room(*state.shape, dtype=torch.float32),
        **{name: room(*heads, plan.chunks, WIDTH, WIDTH) for name in ("states", "d_states")},
        **{name: room(*heads, plan.chunks * CHUNK, WIDTH) for name in ("corrections", "d_targets")},
        "d_initial": room(*state.shape, dtype=torch.float32),
    }
    given = (q, k, v, beta, weights, cumulative, inverse, state)
    walks.walk(plan, (*given, found["out"], found["final"], state, state), read=True)
    walks.walk(plan, (*given, state, state, found["states"], found["corrections"]), read=False)
    back = (found["d_initial"], found["d_states"], found["d_targets"])
    walks.walk_back(plan, (q, k, beta, weights, cumulative, inverse, d_out, d_final, *back))
    return found


def formulas(case: Case) -> dict[str, Tensor]:
    """The same in float64, chunk by chunk, from the kernels' inverse and cumulative log decays."""
    inputs, d_out, d_final = case.inputs()
    plan = delta_rule._plan(inputs[0], inputs[2], inputs[4], SCALE)
    solved = delta_rule._invert(plan, inputs[1], inputs[3], inputs[4])
    q, k, v, _, beta, weights, S = (x.double() for x in inputs)
    P, G = (x.double().unflatten(2, (plan.chunks, CHUNK)) for x in solved)
    G = G[..., None]
    head = torch.arange(plan.heads, device="cuda")
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
    d_S, d_states, d_targets = d_final.double(), [], []
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


def plain(case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The same from the plain kernels, without segments."""
    monkeypatch.setattr(walks, "serve", lambda *_: False)
    monkeypatch.setattr(delta_rule.launch, "segments", lambda *_, **__: 1)
    inputs, d_out, d_final = case.inputs()
    q, k, v, log_decay, beta, weights, state = inputs
    plan = delta_rule._plan(q, v, beta, SCALE)
    solved = delta_rule._invert(plan, k, log_decay, beta)
    out, final, _, _ = delta_rule._walk(plan, inputs, solved, read=True)
    _, _, states, corrections = delta_rule._walk(plan, inputs, solved, read=False)
    d_states, d_targets, d_initial = (torch.empty_like(x) for x in (states, corrections, state))
    delta_rule.walk_back_kernel[(2, plan.rows * plan.heads)](
        q, k, beta, weights, solved[1], solved[0], d_out, d_final, d_initial, d_states, d_targets,
        plan.scale, plan.length, plan.chunks, **plan.walking(),
    )  # fmt: skip
    return {
        "out": out, "final": final, "states": states, "corrections": corrections,
        "d_states": d_states, "d_targets": d_targets, "d_initial": d_initial,
    }  # fmt: skip


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """‖found - wanted‖ / ‖wanted‖ of each result."""
    return {name: ((found[name].double() - x.double()).norm() / x.double().norm()).item() for name, x in wanted.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_equal_the_formulas(case: Case) -> None:
    found = errors(walked(case), formulas(case))
    assert all(error < TOLERANCE for error in found.values()), found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_round_where_the_plain_kernels_do(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = errors(walked(case), plain(case, monkeypatch))
    # Sums in another order round the other way here and there: far less than one rounding of every number.
    assert all(error < TOLERANCE / 8 for error in found.values()), found


def launched(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequence[str], Tensor]:
    """Which of the walks run here in a forward and a backward, and the gradient of q."""
    ran: list[str] = []
    for name in ("walk", "walk_back"):
        kept = getattr(walks, name)
        monkeypatch.setattr(walks, name, lambda *x, name=name, kept=kept, **y: (ran.append(name), kept(*x, **y)))
    inputs, d_out, d_final = case.inputs()
    q, k, v, log_decay, beta, weights, state = inputs
    q.requires_grad_()
    out, final = delta_rule.subhead_delta_rule(q, k, v, log_decay, beta, SCALE, state, weights)
    torch.autograd.backward((out, final), (d_out, d_final))
    monkeypatch.undo()
    assert q.grad is not None
    return ran, q.grad


def test_they_serve_calls_with_many_states_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = Case(3, 300, 8, subheads=8), Case(1, 300, 2, subheads=2)
    ran, found = launched(many, monkeypatch)
    assert sorted(set(ran)) == ["walk", "walk_back"]
    monkeypatch.setenv(hopper.SWITCH, "0")
    without, wanted = launched(many, monkeypatch)
    assert not without
    assert ((found - wanted).float().norm() / wanted.float().norm()).item() < TOLERANCE
    assert not launched(few, monkeypatch)[0]
