"""The Triton kernels of norms and gates in Triton's CPU interpreter, against float64: results and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.ops.norms import op as ops

pytest.importorskip("triton")
kernels = pytest.importorskip("longrecall.ops.norms.triton.rms_norm")
gating = pytest.importorskip("longrecall.ops.norms.triton.gated")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

interpreted = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu_normalisation.py"
)

# Norm of the error over the norm. float32: sums of up to a few thousand terms. Otherwise results and what is kept are
# rounded to 11 or 8 bits, 2.8e-4 or 2.3e-3 of the norm each, two or three of them one after the other.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than the eight programs, or four, that a backward launch has in the interpreter."""
    monkeypatch.setattr(kernels, "TILE", 64)
    monkeypatch.setattr(gating, "BACKWARD_TILE", 64)


def draw(dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def outcome(function: Callable[..., Any], leaves: list[Tensor], device: str) -> dict[str, Tensor]:
    """Results and the gradients of a fixed random scalar, in float64."""
    leaves = [x.detach().to(device).requires_grad_() for x in leaves]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    g = torch.Generator().manual_seed(7)
    # Rounded alike on both sides, so that only what is computed differs.
    weights = [torch.randn(y.shape, generator=g).bfloat16().to(y) for y in results]
    torch.autograd.backward(results, weights)
    found = {f"result {i}": y for i, y in enumerate(results)}
    found |= {f"gradient {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def check(
    op: Callable[..., Any], leaves: list[Tensor], rounding: torch.dtype, device: str = "cpu", **options: Any
) -> None:
    """`op` on the kernels against its definition in float64; `rounding` decides the tolerance."""
    wide = {name: torch.float64 if name == "dtype" else value for name, value in options.items()}
    expected = outcome(lambda *x: op(*x, backend="reference", **wide), [x.double() for x in leaves], "cpu")
    found = outcome(lambda *x: op(*x, backend="triton", **options), leaves, device)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        error = float((found[name] - right).norm() / right.norm().clamp(min=1e-12))
        assert error < TOLERANCE[rounding], f"{name}: {error:.2g}"


def norm(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return ops.rms_norm(x, weight, EPS, **options)


def add_norm(x: Tensor, update: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, update, weight, EPS, **options)


def stream_norm(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, None, weight, EPS, **options)


def gated(x: Tensor, gate: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return ops.gated_rms_norm(x, gate, weight, EPS, **options)


def through(x: Tensor, gate: Tensor, weight: Tensor, matrix: Tensor, **options: Any) -> Tensor:
    return ops.gated_norm_projection(x, gate, weight, matrix, EPS, **options)


SHAPES = [(1, 7, 1), (70, 5, 1), (3, 1000, 1), (37, 24, 3), (2, 8192, 1), (5, 257, 2)]
"""Rows, width of a group, groups: one row; more than one tile of rows; widths that are no power of two."""


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "width", "groups"), SHAPES, ids=str)
def test_norms_equal_float64(rows: int, width: int, groups: int, dtype: torch.dtype) -> None:
    size = width * groups
    x, update, weight = draw(dtype, (rows, size), (rows, size), (size,), seed=rows)
    check(norm, [x, weight], dtype, groups=groups)
    check(stream_norm, [x, weight], dtype, groups=groups)
    # A sum that is rounded before its norm is a rounding that float64 does not have: small for the tolerance.
    check(add_norm, [x, update, weight], dtype, groups=groups)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_stream_may_be_wider_than_the_model(dtype: torch.dtype) -> None:
    (x,) = draw(torch.float32, (70, 40))
    update, weight = draw(dtype, (70, 40), (40,), seed=1)
    # Far outside of float16: what is kept for the backward is normed, and stays inside.
    check(add_norm, [1e6 * x, update, weight], dtype, dtype=dtype)
    check(stream_norm, [x, weight], dtype, dtype=dtype)


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", list(gating.GATES))
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "width", "groups"), SHAPES[:4], ids=str)
def test_gated_norms_equal_float64(rows: int, width: int, groups: int, dtype: torch.dtype, kind: str) -> None:
    size = width * groups
    x, gate, weight = draw(dtype, (rows, size), (rows, size), (size,), seed=rows)
    check(gated, [x, gate, weight], dtype, groups=groups, kind=kind)


@interpreted
def test_a_gate_may_be_columns_of_a_projection_and_heads_side_by_side() -> None:
    x, projected, weight = draw(torch.float32, (2, 9, 30), (2, 9, 77), (30,))
    check(lambda x, p, w, **o: gated(x, p[..., 5:35], w, **o), [x, projected, weight], torch.float32, groups=3)
    weight = weight[:10].clone()
    check(
        lambda x, p, w, **o: gated(x.unflatten(-1, (3, 10)), p[..., 5:35], w, **o),
        [x, projected, weight],
        torch.float32,
    )
    (matrix,) = draw(torch.float32, (4, 30), seed=1)
    check(
        lambda x, p, w, m, **o: through(x.unflatten(-1, (3, 10)), p[..., 5:35], w, m, **o),
        [x, projected, weight, matrix],
        torch.float32,
    )


@interpreted
def test_inputs_of_the_gated_norm_may_differ_in_dtype() -> None:
    x, gate = draw(torch.float32, (40, 24))[0], draw(torch.bfloat16, (40, 24), seed=1)[0]
    weight = draw(torch.float32, (24,), seed=2)[0]
    check(gated, [x, gate, weight], torch.bfloat16, dtype=torch.bfloat16, kind="silu_before")


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", [8, 2048, 5001])
def test_swiglu_equals_float64(size: int, dtype: torch.dtype) -> None:
    gate, up = draw(dtype, (size,), (size,), seed=size)
    check(ops.silu_product, [gate, up], dtype)
    gate, up, weight = draw(dtype, (3, size), (3, size), (4, size), seed=size)
    check(ops.gated_projection, [gate, up, weight / size**0.5], dtype)


@interpreted
def test_what_has_no_gradient_is_left_alone() -> None:
    x, weight = draw(torch.float32, (20, 8), (8,))
    stream, normed = ops.add_rms_norm(x.requires_grad_(), None, weight, EPS, backend="triton")
    (grad,) = torch.autograd.grad(stream.sum(), x, retain_graph=True)
    assert torch.equal(grad, torch.ones_like(x))
    (alone,) = torch.autograd.grad(normed.square().sum(), x, retain_graph=True)
    (both,) = torch.autograd.grad(normed.square().sum() + stream.sum(), x)
    # Sums of two terms in float32.
    assert torch.allclose(both, alone + 1, atol=1e-6)
    with torch.no_grad():
        assert not ops.rms_norm(x, weight, EPS, backend="triton").requires_grad
    gate, up = (t.requires_grad_() for t in draw(torch.float32, (4, 8), (4, 8)))
    frozen = draw(torch.float32, (3, 8))[0]
    ops.gated_projection(gate, up, frozen, backend="triton").sum().backward()
    assert frozen.grad is None and gate.grad is not None


@interpreted
def test_nothing_wider_than_the_model_is_kept() -> None:
    x = draw(torch.float32, (64, 32))[0].requires_grad_()
    weight, gate, up = draw(torch.bfloat16, (32,), (64, 32), (64, 32))
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, normed = ops.add_rms_norm(x, None, weight.requires_grad_(), EPS, dtype=torch.bfloat16, backend="triton")
        ops.gated_norm_projection(normed, gate.requires_grad_(), weight, up.detach(), EPS, backend="triton")
        ops.gated_projection(gate, up.requires_grad_(), up, backend="triton")
    large = [t for t in kept if t.numel() >= 64 * 32]
    assert {t.dtype for t in large} == {torch.bfloat16}
    # The normed rows; both factors of the gated norm; gate, up; two matrices: no activation, no product.
    assert len(large) == 7


@interpreted
def test_a_row_that_is_too_wide_is_declined() -> None:
    x, weight = draw(torch.float32, (1, 8193), (8193,))
    with pytest.raises(ValueError, match="rows of 8193 numbers are too wide; the kernels hold up to 8192"):
        ops.rms_norm(x, weight, EPS, backend="triton")
    with pytest.raises(ValueError, match="gate and up must have one dtype"):
        ops.silu_product(x, x.bfloat16(), backend="triton")
