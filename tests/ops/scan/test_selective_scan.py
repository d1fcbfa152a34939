"""The selective scan in blocks against its loop: outputs, final state, every gradient; and how it grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from longrecall.ops import selective_scan
from longrecall.ops.scan import blocked as blocked_scan

NAMES = ("x", "step", "a", "b", "c", "skip", "initial_state")


def make(
    length: int,
    dtype: torch.dtype,
    seed: int = 0,
    strength: float = 1.0,
    batch: int = 2,
    sizes: tuple[int, int] = (7, 3),
) -> list[Tensor]:
    """The tensors of `NAMES`: channels and numbers of each in `sizes`, decays of up to `strength` a step and number."""
    channels, keys = sizes
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    step = torch.rand(batch, length, channels, generator=g, dtype=torch.float64)
    a = -strength * torch.rand(channels, keys, generator=g, dtype=torch.float64)
    x, b, c = (randn(batch, length, width) for width in (channels, keys, keys))
    return [tensor.to(dtype) for tensor in (x, step, a, b, c, randn(channels), randn(batch, keys, channels))]


def run(tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return selective_scan(*tensors[:-1], initial_state=tensors[-1], **options)


def outputs_and_gradients(tensors: list[Tensor], backend: str) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y, final = run(leaves, backend=backend)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sin() for x in (y, final)]
    ((y * weights[0]).sum() + (final * weights[1]).sum()).backward()
    return [y.detach(), final.detach(), *(leaf.grad for leaf in leaves)]


def relative_error(found: list[Tensor], expected: list[Tensor], floor: float = 1e-12) -> float:
    """Largest error over all tensors, each relative to its own largest entry (at least `floor`)."""
    return max(
        float((a - b).abs().max() / max(float(b.abs().max()), floor)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("size", [1, 4, 16, 256])
@pytest.mark.parametrize("length", [1, 5, 16, 17, 130])
def test_blocks_equal_the_loop_in_float64(length: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_scan, "SHORTEST_BLOCK", size)
    monkeypatch.setattr(blocked_scan, "LONGEST_BLOCK", size)
    tensors = make(length, torch.float64)
    expected = outputs_and_gradients(tensors, "reference")
    # Sums of at most 130 float64 terms in another order: a few hundred ulps at most.
    assert relative_error(outputs_and_gradients(tensors, "chunked"), expected) < 1e-12


def test_gradients_equal_finite_differences() -> None:
    tensors = [tensor.requires_grad_() for tensor in make(6, torch.float64, batch=1)]
    assert gradcheck(lambda *given: run(list(given), backend="chunked"), tensors)


@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e4])
def test_extreme_decays_stay_finite_and_right(strength: float) -> None:
    tensors = make(130, torch.float32, strength=strength)
    expected = outputs_and_gradients([tensor.double() for tensor in tensors], "reference")
    found = [tensor.double() for tensor in outputs_and_gradients(tensors, "chunked")]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found)
    # Float32 sums of a few hundred terms. The floor: where everything is forgotten at once, the gradient of the decay
    # is next to nothing, and 0 is as good.
    assert relative_error(found, expected, floor=1.0) < 1e-5


def test_inputs_stay_as_they_were_and_the_future_does_not_reach_the_past() -> None:
    tensors = make(80, torch.float64)
    copies = [tensor.clone() for tensor in tensors]
    clean, _ = run(tensors, backend="chunked")
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    tensors[0][:, 41:] = float("nan")
    dirty, final = run(tensors, backend="chunked")
    assert torch.equal(dirty[:, :41], clean[:, :41]) and bool(final.isnan().any())


def kept_numbers(length: int) -> int:
    """Numbers that autograd keeps between a forward and its backward."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    tensors = [tensor.requires_grad_() for tensor in make(length, torch.float32)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(tensors, backend="chunked")
    return kept


def test_what_is_kept_for_the_backward_is_linear_and_not_every_state() -> None:
    # Inputs of x, dt, B and C and x again for the skip, 7 + 7 + 3 + 3 + 7 numbers a token; of the 21 numbers of a state
    # one in 16 at most.
    assert kept_numbers(2048) - kept_numbers(1024) <= 2 * 1024 * (27 + 21 / 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (2, 8)}, r"x must be \[B, T, I\]"),
        ({"step": (2, 8, 1)}, "step must be like x"),
        ({"a": (3, 7)}, "step must be like x"),
        ({"c": (2, 8, 4)}, "step must be like x"),
        ({"skip": (1,)}, "step must be like x"),
        ({"initial_state": (2, 7, 3)}, r"initial_state must be \[2, 3, 7\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict, message: str) -> None:
    tensors = dict(zip(NAMES, make(8, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        selective_scan(**tensors | {name: torch.zeros(shape) for name, shape in change.items()})


def test_unknown_backend_and_bad_boundaries() -> None:
    x, step, a, b, c, skip, _ = make(8, torch.float32)
    with pytest.raises(ValueError, match='Did you mean "chunked"'):
        selective_scan(x, step, a, b, c, skip, backend="chunk")
    with pytest.raises(ValueError, match="B must be 1"):
        selective_scan(x, step, a, b, c, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="increase from 0 to 8"):
        selective_scan(x[:1], step[:1], a, b[:1], c[:1], cu_seqlens=torch.tensor([0, 5, 4, 8]))
