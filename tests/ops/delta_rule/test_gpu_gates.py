"""The gates of Gated DeltaNet on a GPU, against float64: results and every gradient."""

from __future__ import annotations

import pytest
import torch

from tests.ops.delta_rule.test_triton_gates import both
from tests.ops.norms.test_triton_normalisation import TOLERANCE, check, draw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(1, 4096, 8), (3, 1001, 6), (2, 700, 96)], ids=str)
def test_gates_equal_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    heads = (shape[-1],)
    check(both, draw(dtype, shape, shape, heads, heads), dtype, device="cuda")
