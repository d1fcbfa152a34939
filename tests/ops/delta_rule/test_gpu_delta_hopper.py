"""`keys_kernel` in Gluon on a Hopper GPU, against its formulas in float64 and against the plain kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrecall.ops.delta_rule.triton import chunked as delta_rule
from longrecall.ops.kernels import hopper
from tests.ops.delta_rule.test_triton_delta_keys import SCALE, Case, errors, formulas, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.why_not(torch.zeros(1, device="cuda").bfloat16()) is not None,
        reason="needs a Hopper GPU and the Triton that the kernels are written for",
    ),
]

CASES = [
    Case(1, 64, 1),
    Case(2, 333, 3),
    # Fewer pairs than multiprocessors, and many more.
    Case(1, 1, 2, subheads=2),
    Case(3, 2500, 8, subheads=4),
    Case(2, 700, 4, subheads=2, repeats=2),
]

TOLERANCE = 8e-3
"""Operands and the results themselves are rounded to bfloat16, each by up to 2^-9 = 2e-3."""


def gluon(case: Case, inputs: dict[str, Tensor], out: list[Tensor], programs: int = 132) -> list[Tensor]:
    from longrecall.ops.delta_rule.hopper.keys import keys_kernel

    keys_kernel[(programs,)](
        *inputs.values(), *out, SCALE, case.rows, case.length, case.chunks,
        KEY_HEADS=case.key_heads, STATE_HEADS=case.heads, SUBHEADS=case.subheads, VALUE_HEADS=case.value_heads,
        num_warps=8,
    )  # fmt: skip
    return [*out[:2], *(x[0] for x in out[2:])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_formulas(case: Case) -> None:
    inputs = case.inputs(torch.bfloat16, "cuda")
    found = errors(gluon(case, inputs, case.outputs(torch.bfloat16, "cuda")), formulas(case, inputs))
    assert all(error < TOLERANCE for error in found.values()), found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_rounds_where_the_plain_kernel_does(case: Case) -> None:
    inputs = case.inputs(torch.bfloat16, "cuda")
    other = [x.double().cpu() for x in plain(case, inputs, "bf16", 64)]
    found = errors(gluon(case, inputs, case.outputs(torch.bfloat16, "cuda")), other)
    # Sums in another order round the other way here and there: far less than one rounding of every number.
    assert all(error < TOLERANCE / 8 for error in found.values()), found


def test_any_number_of_programs_gives_the_same_to_the_bit() -> None:
    case = CASES[3]
    inputs = case.inputs(torch.bfloat16, "cuda")
    few, many = (gluon(case, inputs, case.outputs(torch.bfloat16, "cuda"), programs) for programs in (7, 132))
    assert all(torch.equal(one, other) for one, other in zip(few, many, strict=True))


def test_gradients_may_lie_where_queries_and_keys_do() -> None:
    case = CASES[3]
    inputs = case.inputs(torch.bfloat16, "cuda")
    apart = gluon(case, inputs, case.outputs(torch.bfloat16, "cuda"))
    there = [inputs["q"], inputs["k"], *case.outputs(torch.bfloat16, "cuda")[2:]]
    assert all(torch.equal(one, other) for one, other in zip(gluon(case, inputs, there), apart, strict=True))


def test_the_delta_rule_has_the_same_gradients_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shared keys, over a tail, through the dispatch: with all kernels of the room, and with none."""
    generator = torch.Generator().manual_seed(0)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1)

    B, T, heads, subheads, repeats = 2, 150, 2, 2, 2
    states = heads * subheads * repeats
    q, k = unit(B, T, heads * subheads, 128), unit(B, T, heads * subheads, 128)
    v, out = unit(B, T, heads * repeats, 128), unit(B, T, heads * repeats, 128).to("cuda", torch.bfloat16)
    decay, beta = -torch.rand(B, T, states, generator=generator), torch.rand(B, T, states, generator=generator)
    weights = torch.rand(heads * repeats, subheads, generator=generator) + 0.5
    state = torch.zeros(B, states, 128, 128, device="cuda")

    def gradients(switch: str) -> list[Tensor]:
        monkeypatch.setenv(hopper.SWITCH, switch)
        narrow = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
        gates = [x.to("cuda").requires_grad_() for x in (decay, beta, weights)]
        found, _ = delta_rule.subhead_delta_rule(*narrow, *gates[:2], SCALE, state, gates[2])
        found.backward(out)
        return [x.grad.double() for x in (*narrow, *gates) if x.grad is not None]

    pairs = list(zip(gradients("1"), gradients("0"), strict=True))
    assert len(pairs) == 6
    # What one kernel leaves for the next is rounded to bfloat16: here and there the other way.
    assert all(((x - y).norm() / y.norm()).item() < TOLERANCE for x, y in pairs)


def test_addresses_off_the_grid_are_left_to_the_plain_kernels() -> None:
    numbers = torch.zeros(64, device="cuda").bfloat16()
    assert hopper.why_not(numbers) is None
    assert "16 bytes" in str(hopper.why_not(numbers, numbers[1:]))
