"""The kernels of convolutions without activation, of a few taps and of long filters, against float64; and layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import long_convolution, short_convolution
from longrecall.ops.backends import Op
from longrecall.ops.convolution.diagonal import diagonal_taps
from longrecall.ops.convolution.short import gated_short_convolution
from longrecall.ops.convolution.triton import depthwise
from longrecall.ops.convolution.triton import gated as gated_convolution
from longrecall.ops.execution import unread_states
from longrecall.ops.kernels import launch

interpreted = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1; see test_gpu_filters.py")

# Results of float32 lose a few bits of 24 in sums over tokens, those of bfloat16 are rounded to 8.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def relative(results: list[dict[str, Tensor]]) -> dict[str, float]:
    """Relative errors by name of the second results, of which the first are right."""
    right, found = results
    return {name: float((found[name] - d).norm() / d.norm()) for name, d in right.items()}


def short_errors(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    taps: int,
    bias: bool = True,
    state: bool = False,
    padding: bool = False,
    device: str = "cpu",
) -> dict[str, float]:
    """Relative errors of outputs, new state and all gradients; x lies in wider rows."""
    g = torch.Generator().manual_seed(5)
    B, T, C = shape
    tensors = {"wide": torch.randn(B, T, C + 40, generator=g), "weight": torch.randn(C, taps, generator=g)}
    tensors |= {"bias": torch.randn(C, generator=g)} if bias else {}
    tensors |= {"state": torch.randn(B, C, taps - 1, generator=g)} if state else {}
    mask = (torch.arange(T) < torch.tensor([T - 3 * n for n in range(B)])[:, None]).flip(1).to(device)
    upstream = torch.randn(shape, generator=g), torch.randn(B, C, taps - 1, generator=g)
    results = []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaves = {name: x.to(dtype).to(device, kind).requires_grad_() for name, x in tensors.items()}
        options: dict[str, Any] = {"activation": None, "backend": backend, "mask": mask if padding else None}
        x = leaves["wide"][..., 24 : C + 24]
        y, after = short_convolution(x, leaves["weight"], leaves.get("bias"), state=leaves.get("state"), **options)
        y = y * mask[..., None] if padding else y
        down = [d.to(dtype).to(y) for d in upstream]
        found = torch.autograd.grad([y, after], list(leaves.values()), down)
        named = {"y": y, "after": after, **{f"d_{name}": d for name, d in zip(leaves, found, strict=True)}}
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


def long_errors(
    shape: tuple[int, int, int], lags: int, dtype: torch.dtype, *, padding: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of outputs and gradients; x lies in wider rows, taps fade."""
    g = torch.Generator().manual_seed(5)
    B, T, C = shape
    tensors = {
        "wide": torch.randn(B, T, C + 8, generator=g),
        "taps": torch.randn(C, lags, generator=g) * torch.exp(-3 * torch.arange(lags) / lags),
    }
    mask = (torch.arange(T) < torch.tensor([max(1, T - n) for n in range(B)])[:, None]).flip(1).to(device)
    upstream = torch.randn(shape, generator=g)
    results = []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        narrow = {"wide": dtype, "taps": torch.float32}
        leaves = {
            name: x.to(narrow[name]).to(device, kind if kind == torch.float64 else narrow[name]).requires_grad_()
            for name, x in tensors.items()
        }
        x = leaves["wide"][..., 4 : C + 4]
        y, _ = long_convolution(x, leaves["taps"], mask=mask if padding else None, backend=backend)
        y = y * mask[..., None] if padding else y
        found = torch.autograd.grad([y], list(leaves.values()), [upstream.to(dtype).to(y)])
        named = {"y": y, **{f"d_{name}": d for name, d in zip(leaves, found, strict=True)}}
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


def taps_errors(heads: int, pairs: int, length: int, device: str = "cpu") -> dict[str, float]:
    """Relative errors of taps and gradients; eigenvalues as in H3, whose last angles turn many times."""
    g = torch.Generator().manual_seed(5)
    step = torch.exp(-7 + 4.6 * torch.rand(heads, 1, generator=g))
    tensors = {
        "rate": step / 2 * torch.exp(torch.randn(heads, pairs, generator=g) / 4),
        "angle": step * torch.pi * torch.arange(pairs),
        "gain": torch.randn(heads, pairs, 2, generator=g),
    }
    upstream, results = torch.randn(heads, length, generator=g), []
    for kind, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        leaves = {name: x.to(device, kind).requires_grad_() for name, x in tensors.items()}
        taps = diagonal_taps(leaves["rate"], leaves["angle"], leaves["gain"], length, backend=backend)
        found = torch.autograd.grad([taps], list(leaves.values()), [upstream.to(taps)])
        named = {"taps": taps, **{f"d_{name}": d for name, d in zip(leaves, found, strict=True)}}
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "options",
    [{"taps": 3}, {"taps": 2, "bias": False}, {"taps": 4, "state": True}, {"taps": 3, "state": True, "padding": True}],
    ids=str,
)
def test_a_few_taps_equal_their_sum(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles of a row and of the channels, one with an end of two texts in it.
    monkeypatch.setattr(depthwise, "ROWS", 8)
    monkeypatch.setattr(depthwise, "COLUMNS", 16)
    # Two programs of an interpreter's one multiprocessor, so that each sums several tiles.
    monkeypatch.setattr(depthwise, "PROGRAMS", 4)
    found = short_errors((2, 21, 19), dtype, **options)
    assert len(found) == 4 + options.get("bias", True) + options.get("state", False)
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@interpreted
@pytest.mark.parametrize(
    ("shape", "lags", "padding", "dtype"),
    [
        ((17, 64, 3), 64, False, torch.float32),
        # More rows than a tile has, and more taps: the dtype decides nothing there but how results are rounded.
        ((130, 70, 1), 70, False, torch.float32),
        ((16, 193, 2), 100, False, torch.float32),
        ((16, 130, 2), 130, True, torch.float32),
        ((17, 64, 3), 64, False, torch.bfloat16),
        ((16, 130, 2), 130, True, torch.bfloat16),
    ],
    ids=str,
)
def test_long_filters_equal_their_transforms(
    shape: tuple[int, int, int], lags: int, padding: bool, dtype: torch.dtype
) -> None:
    # The interpreter multiplies in float32.
    found = long_errors(shape, lags, dtype, padding=padding)
    assert set(found) == {"y", "d_wide", "d_taps"}
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@interpreted
@pytest.mark.parametrize(("heads", "pairs", "length"), [(2, 35, 70), (3, 4, 64)])
def test_taps_of_a_diagonal_equal_their_powers(heads: int, pairs: int, length: int) -> None:
    found = taps_errors(heads, pairs, length)
    assert set(found) == {"taps", "d_rate", "d_angle", "d_gain"}
    # An angle of up to some hundred radians in float32 is good to 2^-24 of that.
    assert all(error < 5e-5 for error in found.values()), found


@interpreted
@pytest.mark.parametrize(
    ("shape", "taps", "reason"),
    [((2, 20, 8), 5, "2 to 4 taps"), ((2, 20, 8), 1, "2 to 4 taps"), ((2, 15, 8), 3, "fewer than 16 tokens")],
    ids=str,
)
def test_what_the_kernel_of_a_few_taps_declines(shape: tuple[int, int, int], taps: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        short_convolution(torch.ones(shape), torch.ones(shape[2], taps), activation=None, backend="triton")


@interpreted
@pytest.mark.parametrize(
    ("shape", "before", "reason"),
    [((16, 20, 8), 3, "no history"), ((16, 513, 1), 0, "16 to 512 tokens"), ((15, 20, 8), 0, "fewer than 16 rows")],
    ids=str,
)
def test_what_the_kernels_of_long_filters_decline(shape: tuple[int, int, int], before: int, reason: str) -> None:
    x = torch.ones(shape)
    with pytest.raises(ValueError, match=reason):
        long_convolution(x, torch.ones(shape[2], 4), history=x[:, :before], backend="triton")


LAYERS: dict[str, dict[str, Any]] = {
    "hyena": {"type": "hyena", "inner_dim": 6, "max_length": 20},
    "h3": {"type": "h3", "num_heads": 3, "head_dim": 2, "state_dim": 20},
    "base_conv": {"type": "base_conv", "channels": 6},
    "base_conv_wide": {"type": "base_conv", "channels": 6, "kernel": 20},
    "rwkv5": {"type": "rwkv5", "input_dim": 6, "num_heads": 2, "key_dim": 4, "value_dim": 3},
}


def layer_errors(description: dict[str, Any], shape: tuple[int, int, int], device: str = "cpu") -> dict[str, float]:
    """Relative errors of a layer's outputs and gradients in float32, on the kernels where they are taken."""
    x, upstream = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    torch.manual_seed(0)
    layer, results = mixer_config(description).build(shape[2]).to(device), []
    for kind in (torch.float64, torch.float32):
        layer = layer.to(kind)
        leaf = x.to(device, kind).requires_grad_()
        position = torch.zeros(shape[0], dtype=torch.long, device=device)
        with unread_states():
            y, _ = layer(leaf, None, mask=None, position=position)
        found = torch.autograd.grad([y], [leaf, *layer.parameters()], [upstream.to(y)])
        names = ["d_x", *(f"d_{name}" for name, _ in layer.named_parameters())]
        results.append({name: d.detach().double().cpu() for name, d in zip(["y", *names], (y, *found), strict=True)})
    return relative(results)


@interpreted
@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_on_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU: every call that may have a kernel asks for it.
    asked: list[str] = []

    def on_kernels(op: Op, inputs: dict[str, Tensor | None], backend: str | None = None, **options: Any) -> bool:
        asked.append(op.name)
        return backend in (None, "triton") and op.why_no_kernels(inputs, **options) is None

    monkeypatch.setattr(Op, "on_kernels", on_kernels)
    found = layer_errors(LAYERS[name], (16, 20, 6))
    assert (
        set(asked)
        >= {
            "hyena": {"gated_convolution", "long_convolution"},
            "h3": {"long_convolution", "diagonal_taps", "head_products"},
            "base_conv": {"depthwise_convolution"},
            "base_conv_wide": {"long_convolution"},
            "rwkv5": {"mix_with_previous", "gated_group_norm", "add_bonus"},
        }[name]
    )
    # float32 all along a layer; decays and sines of filters are read off float32 numbers.
    assert all(error < 1e-4 for error in found.values()), found


def gated_errors(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Relative errors of both outputs, the new state and all gradients."""
    g = torch.Generator().manual_seed(5)
    B, T, C = shape
    sizes = {"x": (B, T, 3 * C), "weight": (3 * C, 3), "bias": (3 * C,)}
    tensors = {name: torch.randn(s, generator=g) for name, s in sizes.items()}
    upstream, results = [torch.randn(s, generator=g) for s in (shape, shape, (B, 3 * C, 2))], []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        leaves = {name: x.to(dtype).to(device, kind).requires_grad_() for name, x in tensors.items()}
        outputs = gated_short_convolution(*leaves.values(), backend=backend)
        found = torch.autograd.grad(outputs, list(leaves.values()), [d.to(dtype).to(outputs[0]) for d in upstream])
        names = ("passed", "product", "after", "d_x", "d_weight", "d_bias")
        named = dict(zip(names, (*outputs, *found), strict=True))
        results.append({name: d.detach().double().cpu() for name, d in named.items()})
    return relative(results)


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(3, 21, 19), (1, 16, 5)], ids=str)
def test_gated_convolutions(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_convolution, "COLUMNS", 16)
    monkeypatch.setattr(gated_convolution, "PROGRAMS", 4)
    found = gated_errors(shape, dtype)
    assert len(found) == 6
    assert all(error < TOLERANCE[dtype] for error in found.values()), found
