"""Expansion, convolution, SiLU and norm in Gluon, run on the CPU, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops.expansion.triton import expansion
from longrecall.ops.kernels import hopper
from tests.ops.expansion.test_gpu_expansion_hopper import (
    NAMES,
    TOLERANCE,
    check_below_zero,
    check_large,
    check_nan,
    error,
    results,
)
from tests.ops.expansion.test_triton_expansion import Case
from tests.ops.gluon_emulation import install

CASES = [
    Case(1, 130, 1, 128, 2),
    Case(2, 1, 2, 128, 2, grafted=True),
    Case(1, 63, 1, 128, 2),
    # More streams than a program has.
    Case(9, 64, 1, 64, 2),
    Case(2, 65, 1, 64, 2, grafted=True, normalise=False),
]


def tensors(case: Case) -> dict[str, Tensor]:
    found = {name: x.bfloat16() for name, x in case.tensors().items()}
    shape = (case.rows, case.length, case.heads * case.factor, case.width)
    return {**found, "d_out": torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()}


@pytest.fixture(autouse=True)
def _nothing_is_left_unwritten() -> Iterator[None]:
    """Room for results is full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_equal_the_formulas(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    inputs = tensors(case)
    wanted = results(case, inputs, exact=True)
    errors = {name: error(x, wanted[name]) for name, x in results(case, inputs, exact=False).items()}
    assert ran == ["forward_kernel", "backward_kernel"]
    assert all(x < TOLERANCE for x in errors.values()), errors


@pytest.mark.parametrize("normalise", [False, True])
def test_the_backward_runs_where_the_forward_did(normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward kept means something else to the other kernels, which used to read it."""
    ran = install(monkeypatch)
    inputs = tensors(Case(1, 35, 1, 64, 2, normalise=normalise))
    given = [inputs.get(name) for name in NAMES]

    def gradients(*, switched: bool) -> list[Tensor]:
        with monkeypatch.context() as patch:
            _, kept = expansion.forward(*given, normalise=normalise)
            if switched:
                patch.setattr(hopper, "why_not", lambda *_: "LONGRECALL_GLUON is 0 by now")
            d_before = torch.empty_like(inputs["state"].transpose(1, 2), memory_format=torch.contiguous_format)
            found = expansion.backward(*given, kept, inputs["d_out"], d_before, normalise=normalise)
        return [x for x in (*found, d_before) if x is not None]

    expected, found = gradients(switched=False), gradients(switched=True)
    assert ran == ["forward_kernel", "backward_kernel"] * 2
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("normalise", [False, True])
def test_a_head_far_below_zero_keeps_its_digits(normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    case = Case(1, 35, 1, 64, 2, normalise=normalise)
    check_below_zero(tensors(case), case)


@pytest.mark.parametrize("normalise", [False, True])
def test_large_inputs_stay_finite(normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    case = Case(1, 35, 1, 64, 2, normalise=normalise)
    check_large(tensors(case), case)


def test_nan_stays_in_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    case = Case(1, 17, 1, 64, 2, normalise=False)
    check_nan(tensors(case), case)


def test_a_batch_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    case = Case(0, 17, 1, 64, 2)
    assert results(case, tensors(case), exact=False)["out"].shape == (0, 17, 2, 64)
    assert ran == ["forward_kernel", "backward_kernel"]
