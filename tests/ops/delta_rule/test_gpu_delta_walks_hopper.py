"""The gated delta rule's walks in Gluon on a Hopper GPU, against formulas in float64 and the plain kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops.delta_rule.hopper import walks
from longrecall.ops.delta_rule.triton import chunked as delta_rule
from longrecall.ops.hopper_kernels import HopperKernel
from longrecall.ops.kernels import hopper
from tests.ops.delta_rule.test_hopper_walks import ENDS, SCALE, TOLERANCE, Call, Case, errors, formulas, walked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.why_not(torch.zeros(1, device="cuda").bfloat16()) is not None,
        reason="needs a Hopper GPU and the Triton that the kernels are written for",
    ),
]

CASES = [
    Case(1, 64, 1),
    Case(1, 1, 2, subheads=2),
    Case(2, 333, 3),
    Case(1, 130, 8, subheads=8, fade=50.0),
    Case(2, 200, 8, subheads=4, repeats=2),
    # Two programs for every multiprocessor and more.
    Case(3, 500, 12, subheads=8),
]


def plain(call: Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The same from the plain kernels, without segments."""
    monkeypatch.setattr(HopperKernel, "serves", lambda *_, **__: False)
    monkeypatch.setattr(delta_rule.launch, "segments", lambda *_, **__: 1)
    inputs, solved, plan = call.inputs, call.solved, call.plan
    q, k, _, _, beta, weights, state = inputs
    out, final, _, _ = delta_rule._walk(plan, inputs, solved, read=True)
    _, _, states, corrections = delta_rule._walk(plan, inputs, solved, read=False)
    d_states, d_targets, d_initial = (torch.empty_like(x) for x in (states, corrections, state))
    delta_rule.walk_back_kernel[(2, plan.rows * plan.heads)](
        q, k, beta, weights, solved[1], solved[0], call.d_out, call.d_final, d_initial, d_states, d_targets,
        plan.scale, plan.length, plan.chunks, **plan.walking(),
    )  # fmt: skip
    return {
        "out": out, "final": final, "states": states, "corrections": corrections,
        "d_states": d_states, "d_targets": d_targets, "d_initial": d_initial,
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_equal_the_formulas(case: Case) -> None:
    call = case.call("cuda")
    found = errors(walked(call, walks), formulas(case, call))
    assert all(error < TOLERANCE for error in found.values()), found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_round_where_the_plain_kernels_do(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call = case.call("cuda")
    found = errors(walked(call, walks), plain(call, monkeypatch))
    # Sums in another order round the other way here and there: far less than one rounding of every number.
    assert all(error < TOLERANCE / 8 for error in found.values()), found


@pytest.mark.parametrize(("state", "d_final"), ENDS)
def test_an_end_that_is_not_there_counts_as_zeros(state: bool, d_final: bool) -> None:
    wanted, found = (walked(call, walks) for call in Case(2, 333, 3).call("cuda").ends(state, d_final))
    assert wanted.keys() - found.keys() == ({"d_initial"} if state else set())
    for name, x in found.items():
        assert torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("case", [Case(3, 300, 8, subheads=8), Case(1, 1000, 2, subheads=2)], ids=str)
def test_a_call_without_a_state_finds_what_zeros_find(case: Case) -> None:
    """Whole walks, and walks in segments."""
    results = []
    for call in case.call("cuda").ends(state=True, d_final=True):
        heads = [x.requires_grad_() for x in call.inputs[:2]]
        gates = delta_rule.complete(*call.inputs[2:])
        out, final = delta_rule._DeltaRule.apply(SCALE, *heads, *gates)
        results.append((out, final, *torch.autograd.grad(out, heads, call.d_out)))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def launched(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequence[str], Tensor]:
    """Which of the walks run here in a forward and a backward, and the gradient of q."""
    ran: list[str] = []
    for name in ("walk", "walk_back"):
        kept = getattr(walks, name)
        monkeypatch.setattr(walks, name, lambda *x, name=name, kept=kept, **y: (ran.append(name), kept(*x, **y)))
    call = case.call("cuda")
    q, k, v, log_decay, beta, weights, state = call.inputs
    q.requires_grad_()
    out, final = delta_rule.subhead_delta_rule(q, k, v, log_decay, beta, SCALE, state, weights)
    torch.autograd.backward((out, final), (call.d_out, call.d_final))
    monkeypatch.undo()
    assert q.grad is not None
    return ran, q.grad


def test_walks_forward_serve_calls_with_many_states_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, names in (
        (Case(3, 300, 8, subheads=8), {"walk", "walk_back"}),
        (Case(1, 300, 2, subheads=2), {"walk_back"}),
    ):
        ran, found = launched(case, monkeypatch)
        assert set(ran) == names
        with monkeypatch.context() as patched:
            patched.setenv(hopper.SWITCH, "0")
            without, wanted = launched(case, patched)
        assert not without
        assert ((found - wanted).float().norm() / wanted.float().norm()).item() < TOLERANCE
