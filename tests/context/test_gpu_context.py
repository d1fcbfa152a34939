"""Context parallelism on GPUs, over NCCL and with the kernels."""

from __future__ import annotations

import pytest
import torch

from tests.context.test_context import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_recurrence_over_gpus(gpus: int) -> None:
    """One rank alone, and two: float64 in plain torch, float32 in kernels."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    run_ranks(str(gpus), timeout=600)
