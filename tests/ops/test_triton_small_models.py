"""The kernels between the products of small models (pairs, mixtures, norms, biases, embeddings), against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longrecall.ops.convolution.head_products import pair_products, read_pairs
from longrecall.ops.convolution.triton import head_products
from longrecall.ops.linear_attention.bonus import add_bonus
from longrecall.ops.linear_attention.stepped_values import stepped_values
from longrecall.ops.projections.biased import column_sums
from longrecall.ops.projections.embedding import look_up
from longrecall.ops.projections.triton import embedding
from longrecall.ops.time_mixing.op import gated_group_norm, mix_with_previous
from longrecall.ops.time_mixing.triton import token_shift
from tests.ops.convolution.test_triton_filters import TOLERANCE, interpreted, relative


def pair_errors(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Relative errors of pairs, of what is read from them, and of all gradients."""
    g = torch.Generator().manual_seed(5)
    wide = (*shape[:-1], shape[-1] ** 2)
    tensors = [torch.randn(s, generator=g) for s in (shape, shape, shape, wide)]
    upstream, results = [torch.randn(s, generator=g) for s in (wide, shape)], []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaves = [x.to(dtype).to(device, kind).requires_grad_() for x in tensors]
        # One of them lies otherwise, as heads that were transposed do.
        k = leaves[0].transpose(0, 1).contiguous().transpose(0, 1)
        outputs = [pair_products(k, leaves[1], backend=backend), read_pairs(leaves[2], leaves[3], backend=backend)]
        found = torch.autograd.grad(outputs, leaves, [d.to(dtype).to(outputs[0]) for d in upstream])
        named = dict(zip(("pairs", "read", "d_k", "d_v", "d_q", "d_y"), (*outputs, *found), strict=True))
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(3, 17, 5, 2), (2, 9, 4)], ids=str)
def test_pairs_of_channels_and_their_reads(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_products, "BLOCK", 64)
    found = pair_errors(shape, dtype)
    assert set(found) == {"pairs", "read", "d_k", "d_v", "d_q", "d_y"}
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


def mixture_errors(shape: tuple[int, int, int], mixtures: int, dtype: torch.dtype, device: str = "cpu") -> list[float]:
    """Relative errors of all mixtures and of the gradients of x and of the shares."""
    g = torch.Generator().manual_seed(5)
    tensors = torch.randn(shape, generator=g), torch.rand(mixtures, shape[2], generator=g)
    upstream, results = torch.randn(mixtures, *shape, generator=g), []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaves = [x.to(dtype).to(device, kind).requires_grad_() for x in tensors]
        outputs = mix_with_previous(leaves[0], leaves[1], backend=backend)
        found = torch.autograd.grad(outputs, leaves, [d.to(dtype).to(outputs[0]) for d in upstream])
        results.append([x.detach().double().cpu() for x in (*outputs, *found)])
    return [float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True)]


def norm_errors(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Relative errors of normed, gated heads and of all gradients; the heads have a mean to be taken off."""
    g = torch.Generator().manual_seed(5)
    B, T, H, V = shape
    tensors = {
        "x": 0.5 + torch.randn(shape, generator=g),
        "gate": torch.randn(B, T, H * V, generator=g),
        "weight": torch.randn(H * V, generator=g),
        "bias": torch.randn(H * V, generator=g),
    }
    upstream, results = torch.randn(B, T, H * V, generator=g), []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaves = {name: x.to(dtype).to(device, kind).requires_grad_() for name, x in tensors.items()}
        out = gated_group_norm(*leaves.values(), 1e-3, kind, backend=backend)
        found = torch.autograd.grad([out], list(leaves.values()), [upstream.to(dtype).to(out)])
        named = {"out": out, **{f"d_{name}": d for name, d in zip(leaves, found, strict=True)}}
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "mixtures"), [((3, 13, 70), 4), ((1, 40, 5), 2)], ids=str)
def test_mixtures_with_the_token_before(
    shape: tuple[int, int, int], mixtures: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shift, "PROGRAMS", 2)
    found = mixture_errors(shape, mixtures, dtype)
    assert len(found) == mixtures + 2
    assert all(error < TOLERANCE[dtype] for error in found), found


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(2, 21, 3, 24), (3, 90, 1, 16)], ids=str)
def test_gated_norms_of_heads(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    found = norm_errors(shape, dtype)
    assert set(found) == {"out", "d_x", "d_gate", "d_weight", "d_bias"}
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@interpreted
def test_parameters_may_lie_apart_in_memory() -> None:
    """Every second number of a row, or one number many times over: strides that the kernels do not know."""
    x, gate = torch.randn(2, 20, 3, 4), torch.randn(2, 20, 12)
    weight, bias = torch.randn(12, 2).unbind(1)
    found = gated_group_norm(x, gate, weight, bias, 1e-3, x.dtype, backend="triton")
    expected = gated_group_norm(x, gate, weight, bias, 1e-3, x.dtype, backend="reference")
    # float32: sums of four numbers.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    step, skip = torch.rand(2, 20, 3), torch.randn(3, 2).unbind(1)[0].requires_grad_()
    ys = [stepped_values(x, step, skip, lambda v: (v, v), backend=name)[0] for name in ("triton", "reference")]
    torch.testing.assert_close(*ys, rtol=1e-5, atol=1e-5)
    first, second = (torch.autograd.grad(y.square().sum(), skip)[0] for y in ys)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-4)


def test_pairs_are_numbered_by_an_int32() -> None:
    """Numbers that lie in one place, so that they take no memory."""
    for rows, fits in ((2**29 - 1, True), (2**29, False)):
        heads, pairs = torch.zeros(1).expand(rows, 2), torch.zeros(1).expand(rows, 4)
        for other in (heads, pairs):
            reason = head_products.why_not(heads, other)
            assert ("more than the kernels can number" in str(reason)) is not fits


def test_mixtures_have_the_dtype_of_x() -> None:
    """As under autocast, where parameters are wider."""
    x, shares = torch.randn(2, 5, 6).bfloat16(), torch.rand(3, 6)
    assert {y.dtype for y in mix_with_previous(x, shares)} == {torch.bfloat16}


def table_errors(
    share: float, shape: tuple[int, int], vocab: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of rows and of the gradient of a table ``[vocab, n]``, where token 3 is that share of all m."""
    g = torch.Generator().manual_seed(5)
    count, width = shape
    ids = torch.randint(0, vocab, (2, count // 2), generator=g)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < share, 3).to(device)
    table, upstream = torch.randn(vocab, width, generator=g), torch.randn(*ids.shape, width, generator=g)
    results = []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaf = table.to(dtype).to(device, kind).requires_grad_()
        rows = look_up(ids, leaf, backend=backend)
        (found,) = torch.autograd.grad([rows], [leaf], [upstream.to(dtype).to(rows)])
        results.append({"rows": rows.detach().double().cpu(), "d_table": found.double().cpu()})
    return relative(results)


@interpreted
@pytest.mark.parametrize(
    ("share", "vocab", "dtype"),
    [(0.8, 50, torch.float32), (0.0, 5, torch.bfloat16), (1.0, 40000, torch.float32), (0.1, 200, torch.bfloat16)],
    ids=str,
)
def test_the_gradient_of_a_table(share: float, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter scans one number at a time: small tiles, of which a run may fill many.
    monkeypatch.setattr(embedding, "ROWS", 8)
    monkeypatch.setattr(embedding, "COLUMNS", 4)
    monkeypatch.setattr(embedding, "FEWEST", 0)
    found = table_errors(share, (60, 5), vocab, dtype)
    assert found["rows"] == 0.0
    assert found["d_table"] < TOLERANCE[dtype], found


def sums_error(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> float:
    """Relative error of the sums of the columns of a matrix with a mean."""
    x = (1 + torch.randn(shape, generator=torch.Generator().manual_seed(5))).to(dtype).to(device)
    found, right = column_sums(x, backend="triton"), x.double().sum(0)
    assert found.dtype == dtype
    return float((found - right).norm() / right.norm())


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(330, 70), (200, 70), (63, 4)], ids=str)
def test_sums_of_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert sums_error(shape, dtype) < TOLERANCE[dtype]


def bonus_errors(shape: tuple[int, int, int], keys: int, values: int, device: str = "cpu") -> dict[str, float]:
    """Relative errors of outputs and all gradients in float32, in which layers call it."""
    g = torch.Generator().manual_seed(5)
    wide, narrow, (B, _, H) = (*shape, values), (*shape, keys), shape
    named = {"reads": wide, "first": (B, 1, H, values), "r": narrow, "k": narrow, "v": wide, "bonus": (H, keys)}
    tensors = {name: torch.randn(s, generator=g) for name, s in named.items()}
    upstream, results = torch.randn(wide, generator=g), []
    for kind, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        leaves = {name: x.to(device, kind).requires_grad_() for name, x in tensors.items()}
        out = add_bonus(**leaves, backend=backend)
        found = torch.autograd.grad([out], list(leaves.values()), [upstream.to(out)])
        outs = {"out": out, **{f"d_{name}": d for name, d in zip(leaves, found, strict=True)}}
        results.append({name: d.detach().double().cpu() for name, d in outs.items()})
    return relative(results)


@interpreted
@pytest.mark.parametrize(("shape", "keys", "values"), [((2, 37, 3), 8, 24), ((3, 20, 1), 33, 16)], ids=str)
def test_reads_moved_on_plus_the_bonus(shape: tuple[int, int, int], keys: int, values: int) -> None:
    found = bonus_errors(shape, keys, values)
    assert len(found) == 7
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


def stepped_errors(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Relative errors of y around a recurrence that is no more than a sum over time, and of all gradients.

    The values are a slice of wider rows, as Mamba-2's lie beside its keys.
    """
    g = torch.Generator().manual_seed(5)
    B, T, H, P = shape
    rows, step = torch.randn(B, T, H * P + 6, generator=g), torch.rand(B, T, H, generator=g)
    skip, upstream, results = torch.randn(H, generator=g), torch.randn(shape, generator=g), []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        wide = torch.float64 if kind == torch.float64 else torch.float32
        given = [x.to(dtype) for x in (rows,)] + [step, skip]
        leaves = [x.to(device, k).requires_grad_() for x, k in zip(given, (kind, wide, wide), strict=True)]

        def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.cumsum(1) / 4, x.sum(1)

        values = leaves[0][..., : H * P].unflatten(-1, (H, P))
        y, final = stepped_values(values, leaves[1], leaves[2], attend, backend=backend)
        assert y.dtype == wide
        found = torch.autograd.grad([y, final], leaves, [upstream.to(y), upstream[:, 0].to(y)])
        named = dict(zip(("y", "final", "d_values", "d_step", "d_skip"), (y, final, *found), strict=True))
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(2, 37, 3, 10), (1, 50, 2, 16)], ids=str)
def test_values_around_a_recurrence(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    found = stepped_errors(shape, dtype)
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@interpreted
def test_what_stands_for_the_values_times_d_is_not_read_or_copied() -> None:
    values = torch.randn(2, 9, 3, 4, requires_grad=True)
    step, skip = torch.rand(2, 9, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    y, _ = stepped_values(values, step, skip, lambda x: (torch.zeros_like(x), x.sum(1)), backend="triton")
    y.sum().backward()
    # Nothing of the values reaches y; what does, by D, still has its gradient.
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(values.grad, torch.zeros_like(values))
    torch.testing.assert_close(skip.grad, values.detach().sum((0, 1, 3)))
