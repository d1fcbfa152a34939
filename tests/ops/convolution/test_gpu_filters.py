"""The kernels of convolutions, of token mixing and of embeddings' gradients on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.convolution.test_triton_filters import TOLERANCE, gated_errors, long_errors, short_errors, taps_errors
from tests.ops.test_triton_small_models import (
    bonus_errors,
    mixture_errors,
    norm_errors,
    pair_errors,
    stepped_errors,
    sums_error,
    table_errors,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture
def loose_products() -> Iterator[None]:
    """The precision of products that sweeps use."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@dtypes
@pytest.mark.parametrize(
    "options",
    [{"taps": 3}, {"taps": 2, "bias": False}, {"taps": 4, "state": True}, {"taps": 3, "state": True, "padding": True}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(2, 1003, 768), (3, 300, 70), (1, 17, 64)], ids=str)
def test_a_few_taps(shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    found = short_errors(shape, dtype, **options, device="cuda")
    assert all(error < 2 * TOLERANCE[dtype] for error in found.values()), found


@dtypes
@pytest.mark.parametrize(
    ("shape", "lags"),
    [((128, 512, 9), 512), ((64, 64, 40), 64), ((200, 130, 33), 130), ((16, 200, 5), 77), ((31, 509, 4), 509)],
    ids=str,
)
@pytest.mark.parametrize("padding", [False, True])
def test_long_filters(shape: tuple[int, int, int], lags: int, padding: bool, dtype: torch.dtype) -> None:
    found = long_errors(shape, lags, dtype, padding=padding, device="cuda")
    # Three products of tf32 leave out the product of the two small parts: 2^-22 of each.
    assert all(error < 4 * TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.usefixtures("loose_products")
def test_long_filters_in_tf32() -> None:
    found = long_errors((64, 256, 64), 256, torch.float32, device="cuda")
    # tf32 rounds both operands to 11 bits.
    assert 1e-5 < max(found.values()) < 1e-3, found


@pytest.mark.parametrize(("heads", "pairs", "length"), [(64, 256, 512), (3, 35, 70)])
def test_taps_of_a_diagonal(heads: int, pairs: int, length: int) -> None:
    found = taps_errors(heads, pairs, length, device="cuda")
    # An angle of up to some thousand radians in float32 is good to 2^-24 of that.
    assert all(error < 1e-3 for error in found.values()), found


@dtypes
@pytest.mark.parametrize("shape", [(8, 512, 64, 2), (3, 17, 5, 4), (2, 100, 8)], ids=str)
def test_pairs_of_channels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = pair_errors(shape, dtype, device="cuda")
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@dtypes
@pytest.mark.parametrize(("shape", "mixtures"), [((9, 512, 256), 4), ((3, 301, 70), 4), ((1, 40, 5), 2)], ids=str)
def test_mixtures_with_the_token_before(shape: tuple[int, int, int], mixtures: int, dtype: torch.dtype) -> None:
    found = mixture_errors(shape, mixtures, dtype, device="cuda")
    assert all(error < 2 * TOLERANCE[dtype] for error in found), found


@dtypes
@pytest.mark.parametrize("shape", [(9, 512, 4, 64), (3, 301, 3, 24)], ids=str)
def test_gated_norms_of_heads(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    found = norm_errors(shape, dtype, device="cuda")
    assert all(error < 2 * TOLERANCE[dtype] for error in found.values()), found


@dtypes
@pytest.mark.parametrize(("share", "vocab"), [(0.8, 8192), (0.0, 11), (1.0, 40000), (0.1, 3000)], ids=str)
@pytest.mark.parametrize("shape", [(65536, 256), (5002, 70)], ids=str)
def test_the_gradient_of_a_table(share: float, vocab: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = table_errors(share, shape, vocab, dtype, device="cuda")
    assert found["rows"] == 0.0
    # Sums of up to 65536 numbers.
    assert found["d_table"] < 4 * TOLERANCE[dtype], found


@dtypes
@pytest.mark.parametrize("shape", [(65536, 64), (30001, 770)], ids=str)
def test_sums_of_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert sums_error(shape, dtype, device="cuda") < TOLERANCE[dtype]


@pytest.mark.parametrize(("shape", "keys", "values"), [((9, 512, 4), 64, 64), ((3, 301, 3), 24, 40)], ids=str)
def test_reads_moved_on_plus_the_bonus(shape: tuple[int, int, int], keys: int, values: int) -> None:
    found = bonus_errors(shape, keys, values, device="cuda")
    assert all(error < 2 * TOLERANCE[torch.float32] for error in found.values()), found


@dtypes
@pytest.mark.parametrize("shape", [(5, 512, 256), (3, 301, 70), (1, 17, 64)], ids=str)
def test_gated_convolutions(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    found = gated_errors(shape, dtype, device="cuda")
    # Products of two convolutions: both round.
    assert all(error < 2 * TOLERANCE[dtype] for error in found.values()), found


@dtypes
@pytest.mark.parametrize("shape", [(2, 515, 8, 64), (3, 100, 3, 40), (1, 70, 64, 128)], ids=str)
def test_values_around_a_recurrence(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    found = stepped_errors(shape, dtype, device="cuda")
    assert all(error < TOLERANCE[dtype] for error in found.values()), found
