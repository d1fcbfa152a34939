"""The short convolution's kernels as `short_convolution` calls them, against the sum over taps in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops import short_convolution
from longrecall.ops.convolution.short import SHORT_CONVOLUTION
from longrecall.ops.convolution.triton import short as convolution
from longrecall.ops.execution import padding_at_the_end
from longrecall.ops.kernels import launch

interpreted = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; see test_gpu_convolution.py"
)

# Results of float32 lose a few bits of 24 in sums over tokens, those of bfloat16 are rounded to 8.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def errors(
    shape: tuple[int, int, int], dtype: torch.dtype, *, bias: bool, padding: str | None = None, device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of outputs, new state and all gradients; x lies in wider rows, as in Mamba-2.

    padding: "last" = known to come last, "anywhere" = hidden in a mask, None = there is none.
    """
    g = torch.Generator().manual_seed(5)
    B, T, C = shape
    tensors = {
        "wide": torch.randn(B, T, C + 64, generator=g),
        "weight": torch.randn(C, 4, generator=g),
        "state": torch.randn(B, C, 3, generator=g),
        "bias": torch.randn(C, generator=g),
    }
    mask = None
    if padding is not None:
        counts = torch.tensor([T - 3 * n for n in range(B)])
        mask = torch.arange(T) < counts[:, None]
        mask = (mask if padding == "last" else mask.flip(1)).to(device)
    upstream = torch.randn(shape, generator=g), torch.randn(B, C, 3, generator=g)
    results = []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaves = {name: x.to(dtype).to(device, kind).requires_grad_() for name, x in tensors.items()}
        x = leaves["wide"][..., 32 : C + 32]
        options: dict[str, Any] = {"state": leaves["state"], "mask": mask, "backend": backend}
        if padding == "last":
            assert mask is not None
            with padding_at_the_end(mask):
                y, after = short_convolution(x, leaves["weight"], leaves["bias"] if bias else None, **options)
        else:
            y, after = short_convolution(x, leaves["weight"], leaves["bias"] if bias else None, **options)
        y = y if mask is None else y * mask[..., None]
        down = [d.to(dtype).to(y) for d in upstream]
        wanted = [leaf for name, leaf in leaves.items() if bias or name != "bias"]
        found = torch.autograd.grad([y, after], wanted, down)
        named = {"y": y, "after": after, **{f"d_{name}": d for name, d in zip(leaves, found, strict=False)}}
        results.append({name: d.detach().double() for name, d in named.items()})
    right, found = results
    return {name: float((found[name] - d).norm() / d.norm()) for name, d in right.items()}


@interpreted
@pytest.mark.parametrize(
    ("bias", "padding", "dtype"),
    [
        (True, None, torch.float32),
        (False, None, torch.float32),
        (True, "last", torch.float32),
        (True, "anywhere", torch.float32),
        # Where padding is decides which inputs are read, whatever their dtype.
        (True, "last", torch.bfloat16),
        (False, None, torch.bfloat16),
    ],
    ids=str,
)
def test_the_kernels_equal_the_sum_over_taps(
    bias: bool, padding: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several programs a row, so that what they read of their neighbours counts.
    monkeypatch.setattr(convolution, "SEGMENT", 8)
    found = errors((2, 21, 96), dtype, bias=bias, padding=padding)
    assert set(found) == {"y", "after", "d_wide", "d_weight", "d_state"} | ({"d_bias"} if bias else set())
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@interpreted
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": (32, 3)}, "4 taps, not of 3"),
        ({"x": (1, 20, 40), "weight": (40, 4)}, "multiple of 32, not 40"),
        ({"x": (9, 15, 32)}, "fewer than 16 tokens"),
    ],
)
def test_what_the_kernels_decline_is_said(change: dict[str, Any], message: str) -> None:
    x, weight = (torch.zeros(change.get(name, shape)) for name, shape in (("x", (1, 20, 32)), ("weight", (32, 4))))
    with pytest.raises(ValueError, match=message):
        short_convolution(x, weight, activation=change.get("activation", "silu"), backend="triton")
    y, _ = short_convolution(x, weight, activation=change.get("activation", "silu"))
    assert y.shape == x.shape


def test_a_cpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    tensors: dict[str, Tensor | None] = {"x": torch.zeros(1, 20, 32), "weight": torch.zeros(32, 4)}
    assert not SHORT_CONVOLUTION.on_kernels(tensors, activation="silu")
    with pytest.raises(ValueError, match='unknown backend "fast"'):
        short_convolution(torch.zeros(1, 20, 32), torch.zeros(32, 4), backend="fast")


@interpreted
def test_what_was_saved_may_come_back_laid_out_anew() -> None:
    """As `save_on_cpu` brings it back."""
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=g) for shape in ((2, 33, 1, 32), (32, 4), (2, 32, 3))]
    upstream = torch.randn(2, 33, 1, 32, generator=g)

    def gradients() -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in given]
        return torch.autograd.grad(convolution.convolve_heads(*leaves, normalise=True), leaves, upstream)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, Tensor.contiguous):
        found = gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
