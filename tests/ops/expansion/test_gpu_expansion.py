"""Expansion, convolution, SiLU and norm on a GPU, in one launch and in two, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.expansion.test_triton_expansion import (
    ALIKE,
    TOLERANCE,
    Case,
    error,
    expansion_errors,
    one_launch,
    unlike,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES = [
    Case(2, 1003, 2, 128, 4),
    Case(1, 17, 1, 128, 8, grafted=True),
    Case(2, 300, 2, 128, 2, normalise=False),
    Case(2, 1003, 2, 64, 2),
    Case(1, 129, 2, 64, 4, grafted=True, normalise=False),
    # Left to the two passes.
    Case(1, 65, 1, 256, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_equals_the_formulas(case: Case) -> None:
    assert error(case, torch.bfloat16, "cuda") < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_equals_the_formula(case: Case) -> None:
    found = expansion_errors(case, torch.bfloat16, "cuda")
    assert all(error < TOLERANCE[torch.bfloat16] for error in found.values()), found


def test_float32_takes_two_passes_that_are_as_precise() -> None:
    # Hopper's sigmoid of four instructions is good to two or three units in the last place.
    assert error(Case(1, 100, 1, 128, 2), torch.float32, "cuda") < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_rounds_as_two_do(case: Case) -> None:
    assert unlike(case, torch.bfloat16, "cuda") < ALIKE


def test_two_runs_agree_to_the_bit() -> None:
    tensors = {name: x.cuda().bfloat16() for name, x in CASES[0].tensors().items()}
    assert torch.equal(one_launch(CASES[0], **tensors), one_launch(CASES[0], **tensors))
