"""The chunked recurrences on a GPU against the float64 reference on the CPU: outputs, final state, every gradient."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_recurrences import CASES, make, outputs_and_gradients, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(inputs: list) -> list:
    return [None if x is None else x.cuda() for x in inputs]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [5, 64, 130, 1100])
def test_chunked_equals_reference(case: str, length: int) -> None:
    op, inputs = make(case, length, torch.float32)
    wide = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(op, wide, "reference" if length < 1000 else "chunked")
    found = [x.double().cpu() for x in outputs_and_gradients(op, on_gpu(inputs), "chunked")]
    # float32 sums of up to a thousand terms, without tensor-float-32 (torch's default).
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_extreme_decays(case: str) -> None:
    op, inputs = make(case, 130, torch.float32, strength=1e4)
    wide = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(op, wide, "reference")
    found = [x.double().cpu() for x in outputs_and_gradients(op, on_gpu(inputs), "chunked")]
    assert all(bool(torch.isfinite(x).all()) for x in found)
    # As on the CPU: cumulative decays of up to 64 * 30 whose low bits are 1e-4; what is forgotten has no gradient.
    assert relative_error(found, expected, floor=1.0) < 1e-3
