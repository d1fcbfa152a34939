"""The short convolution's kernels on a GPU, as Mamba-2 calls them, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.convolution.test_triton_convolution import TOLERANCE, errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("bias", "padding"), [(True, None), (False, None), (True, "last"), (True, "anywhere")])
@pytest.mark.parametrize("shape", [(2, 1003, 4352), (3, 300, 96), (1, 17, 64)], ids=str)
def test_the_kernels_equal_the_sum_over_taps(
    shape: tuple[int, int, int], bias: bool, padding: str | None, dtype: torch.dtype
) -> None:
    found = errors(shape, dtype, bias=bias, padding=padding, device="cuda")
    # Hopper's sigmoid of four instructions is good to two or three units in the last place.
    assert all(error < 2 * TOLERANCE[dtype] for error in found.values()), found
