"""`keys_kernel` in Gluon, run on the CPU: against its formulas in float64; test_gpu_delta_hopper.py runs the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.delta_rule.test_triton_delta_keys import SCALE, Case, errors, formulas
from tests.ops.gluon_emulation import load

TOLERANCE = 8e-3
"""Operands and the results themselves are rounded to bfloat16, each by up to 2^-9 = 2e-3."""


def gluon(inputs: dict[str, Tensor], out: list[Tensor], programs: int) -> list[Tensor]:
    load("delta_rule.hopper.keys").keys_backward((*inputs.values(), *out), SCALE, programs)
    return [*out[:2], *(x[0] for x in out[2:])]


@pytest.mark.parametrize(
    ("case", "programs"),
    [
        (Case(1, 64, 1), 1),
        (Case(2, 1, 2, subheads=2), 3),
        (Case(1, 63, 2), 1),
        (Case(1, 65, 2, subheads=2, repeats=2), 3),
        # More programs than pairs.
        (Case(1, 130, 1, repeats=2), 132),
        (Case(2, 130, 2, subheads=2), 2),
    ],
    ids=str,
)
def test_it_equals_the_formulas(case: Case, programs: int) -> None:
    inputs = case.inputs(torch.bfloat16, "cpu")
    found = errors(gluon(inputs, case.outputs(torch.bfloat16, "cpu"), programs), formulas(case, inputs))
    assert all(error < TOLERANCE for error in found.values()), found


def test_any_number_of_programs_gives_the_same_to_the_bit_also_where_queries_and_keys_lie() -> None:
    case = Case(2, 130, 2, subheads=2)
    inputs = case.inputs(torch.bfloat16, "cpu")
    one, five = (gluon(inputs, case.outputs(torch.bfloat16, "cpu"), programs) for programs in (1, 5))
    there = gluon(inputs, [inputs["q"], inputs["k"], *case.outputs(torch.bfloat16, "cpu")[2:]], 3)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(one, five, there, strict=True))
