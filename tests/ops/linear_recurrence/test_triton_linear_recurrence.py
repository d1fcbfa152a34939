"""The kernels of the linear recurrence in Triton's CPU interpreter, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from tests.ops.linear_recurrence.test_linear_recurrence import EVERY, OPS, largest_error, outputs_and_gradients

pytest.importorskip("triton")
kernels = pytest.importorskip("longrecall.ops.linear_recurrence.triton.scan")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

pytestmark = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu_linear_recurrence.py"
)


@EVERY
@pytest.mark.parametrize(("length", "channels"), [(1, 5), (8, 1), (9, 5), (26, 5)])
def test_kernels_equal_the_reference(name: str, length: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several chunks in few tokens, and two blocks of channels of which the second is not full.
    monkeypatch.setattr(kernels, "CHUNK", 8)
    monkeypatch.setattr(kernels, "CHANNELS", 4)
    op, make = OPS[name]
    tensors = make(length, channels=channels)
    found = outputs_and_gradients(op, [tensor.float() for tensor in tensors], "triton")
    # float32 sums of at most 26 terms.
    assert largest_error(found, outputs_and_gradients(op, tensors, "reference"), floor=1.0) < 5e-6


def test_two_runs_agree_to_the_bit() -> None:
    op, make = OPS["linear_recurrence"]
    tensors = [tensor.float() for tensor in make(20)]
    first, second = (outputs_and_gradients(op, tensors, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
