"""Products with weights of one byte a number, against float64 products with the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

launch = pytest.importorskip("longrecall.ops.kernels.launch")

from longrecall.ops.decoding.triton import products, wide_products  # noqa: E402
from longrecall.ops.row_scaled import RowScaled  # noqa: E402
from tests.ops.decoding.test_triton_step import DEVICE, pytestmark, randn  # noqa: E402, F401

KINDS = (torch.int8, torch.float8_e4m3fn)
# Products of 40 float32 numbers added up in another order; the largest is near 40.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
SIZE = 40
"""Channels: no power of two, so that the last ones of a tile are masked."""


def scaled(seed: int, count: int, size: int, kind: torch.dtype, dtype: torch.dtype = torch.float32) -> RowScaled:
    """A weight with every byte that can occur in it, and scales of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    if kind == torch.int8:
        numbers = torch.randint(-128, 128, (count, size), generator=generator, dtype=torch.int8)
    else:
        numbers = torch.randn(count, size, generator=generator).mul(50).clamp(-448, 448).to(kind)
        # The largest, the least normal and the least of all.
        numbers[0, :3] = torch.tensor([448.0, 2.0**-6, -(2.0**-9)]).to(kind)
    scales = torch.logspace(-3, -1, count)
    return RowScaled(numbers.to(DEVICE), scales.to(DEVICE), dtype)


def exact(weight: RowScaled) -> Tensor:
    """The numbers that it stands for, in float64."""
    return weight.numbers.double() * weight.scales.double()[:, None]


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * norm).double()


@pytest.mark.skipif(DEVICE == "cuda", reason="what the interpreter and numpy make of bits")
def test_every_byte_is_read_as_what_it_is() -> None:
    """A sum of one term: nothing is rounded but the float32 product with the scale."""
    numbers = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)[:, None]
    for kind in KINDS:
        found, weight = torch.zeros(1, 256), RowScaled(numbers.view(kind), torch.ones(256), torch.float32)
        products.add_product(torch.ones(1, 1), weight, found)
        expected = weight.numbers.float().T
        # Two bytes of float8 are no number; Triton's interpreter reads them as 480, and no weight has them.
        sane = ~expected.isnan()
        assert (~sane).sum() == (2 if kind != torch.int8 else 0)
        assert torch.equal(found[sane], expected[sane])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_projections_of_the_normed_stream(kind: torch.dtype) -> None:
    """More weights than a launch takes; plain ones between them are another launch, and the order stays."""
    x, norm = randn(1, 2, SIZE), 1 + randn(2, SIZE)
    counts = [3, 1, 9, 5, 6, 7, 2, 4, 8, 3, 2]
    weights: list[products.Weight] = [scaled(3 + i, n, SIZE, kind) for i, n in enumerate(counts)]
    weights[4] = randn(20, 6, SIZE)
    weights[7] = scaled(21, 4, SIZE, next(other for other in KINDS if other != kind))
    found = products.norm_and_project(x, norm, 1e-6, weights)
    for y, weight in zip(found, weights, strict=True):
        matrix = exact(weight) if isinstance(weight, RowScaled) else weight.double()
        torch.testing.assert_close(y.double(), normed(x, norm) @ matrix.T, **CLOSE)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mlp_and_added_product(kind: torch.dtype) -> None:
    x, norm = randn(1, 2, SIZE), 1 + randn(2, SIZE)
    gate, up, down = (scaled(seed, n, m, kind) for seed, n, m in ((3, 11, SIZE), (4, 11, SIZE), (5, SIZE, 11)))
    found = products.norm_and_gate_up(x, norm, 1e-6, gate, up)
    expected = F.silu(normed(x, norm) @ exact(gate).T) * (normed(x, norm) @ exact(up).T)
    # A product of two such sums, each of which may be off by as much.
    torch.testing.assert_close(found.double(), expected, rtol=4e-5, atol=1e-4)
    stream, before = x.clone(), x.double()
    products.add_product(found, down, stream)
    expected = found.double() @ exact(down).T
    torch.testing.assert_close(stream.double(), before + expected, rtol=1e-5, atol=1e-4)
    # Rows of another tensor's columns, as of several products in one launch; with a bias and without.
    rows, bias = torch.cat([x, found, x], 1)[:, SIZE : SIZE + 11], randn(6, SIZE)
    for given in (None, bias):
        whole = expected if given is None else expected + given.double()
        torch.testing.assert_close(products.product(rows, down, given).double(), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [5, 70])
def test_products_of_many_rows(kind: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in both directions, none of them full; rows that lie apart, with a bias and without."""
    monkeypatch.setattr(wide_products, "_COLUMNS", 16)
    weight, bias = scaled(3, 19, SIZE, kind), randn(6, 19)
    x = randn(1, rows, 2 * SIZE)
    for given in (None, bias):
        for inputs in (x[:, SIZE:], x[:, :SIZE].T.contiguous().T):
            expected = inputs.double() @ exact(weight).T + (0 if given is None else given.double())
            found = wide_products.wide_product(inputs, weight, given).double()
            # Sums of 40 products in float32.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_wide_weight_in_bfloat16_is_rounded_once(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than are loaded at a time; the sum is float32, and its scale is not rounded to bfloat16."""
    monkeypatch.setattr(products, "_COLUMNS", 16)
    weight = scaled(3, 6, SIZE, kind, torch.bfloat16)
    # Of rms 1, so that a normed x is no rounded one.
    x, norm = randn(1, 2, SIZE).sign(), torch.ones(SIZE, device=DEVICE)
    (found,) = products.norm_and_project(x, norm, 0.0, [weight])
    assert found.dtype == torch.bfloat16
    # The distance of two bfloat16 numbers: the interpreter cuts off where a GPU rounds. And float32's errors of terms
    # that cancel.
    torch.testing.assert_close(found.double(), x.double() @ exact(weight).T, rtol=2**-7, atol=2e-5)
