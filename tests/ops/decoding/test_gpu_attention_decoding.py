"""One token of softmax attention on a GPU at the sizes of models, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.decoding.test_triton_attention_decoding import check, inputs_of
from tests.ops.test_gpu import TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "width", "room", "read", "window", "meta"),
    [
        ((8, 8), 256, 40960, 33000, None, 0),
        ((32, 8), 128, 12288, 9000, None, 0),
        ((16, 16), 64, 4096, 2048, None, 0),
        ((25, 5), 64, 2048, 5000, 1024, 128),
        ((8, 2), 96, 4096, 3, None, 0),
    ],
)
def test_it_is_the_formula(
    heads: tuple[int, int], width: int, room: int, read: int, window: int | None, meta: int, dtype: torch.dtype
) -> None:
    check(inputs_of(heads, width, room, read, meta, dtype, "cuda"), window, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "width", "room", "read", "window", "options"),
    [
        # Qwen3.5-0.8B; Olmo's without positions; a soft cap at a long context.
        ((8, 2), 256, 4096, 3000, None, {"gated", "normed", "offset", "half"}),
        ((30, 30), 128, 4096, 4000, None, {"still"}),
        ((16, 4), 128, 40960, 33000, None, {"capped", "scaled", "normed", "gated"}),
        ((8, 8), 64, 40, 30, 20, {"gated", "half", "capped"}),
    ],
)
def test_its_options(
    heads: tuple[int, int],
    width: int,
    room: int,
    read: int,
    window: int | None,
    options: set[str],
    dtype: torch.dtype,
) -> None:
    check(inputs_of(heads, width, room, read, 0, dtype, "cuda"), window, TOLERANCE[dtype], options)
