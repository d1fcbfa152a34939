"""RWKV's linear attention, made of gated linear attention, against its own loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrecall.ops import bonus_linear_attention, reference

B, H, K, V = 2, 3, 4, 5


def make(length: int, seed: int = 0, strength: float = 1.0, batch: int = B) -> list[Tensor]:
    """r, k, v, log decay, bonus and the initial state in float64."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    decay = -strength * torch.rand(batch, length, H, K, generator=g, dtype=torch.float64)
    r, k, v = randn(batch, length, H, K), randn(batch, length, H, K), randn(batch, length, H, V)
    return [r, k, v, decay, randn(H, K), randn(batch, H, K, V)]


def outputs_and_gradients(tensors: list[Tensor], backend: str | None) -> list[Tensor]:
    """By the loop of its own when `backend` is None."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    if backend is None:
        o, final = reference.bonus_linear_attention(*leaves)
    else:
        o, final = bonus_linear_attention(*leaves[:-1], initial_state=leaves[-1], backend=backend)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sin() for x in (o, final)]
    ((o * weights[0]).sum() + (final * weights[1]).sum()).backward()
    return [o.detach(), final.detach(), *(leaf.grad for leaf in leaves)]


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest error over all tensors, each relative to its own largest entry."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("length", [2, 5, 16, 65, 130])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 50.0])
def test_it_equals_its_own_loop_in_float64(strength: float, length: int, backend: str) -> None:
    tensors = make(length, strength=strength)
    expected = outputs_and_gradients(tensors, None)
    # Sums of at most 130 float64 terms in another order: a few hundred ulps; decays of up to 130 * 50 cost three digits
    # of their differences.
    assert relative_error(outputs_and_gradients(tensors, backend), expected) < (1e-12 if strength <= 1 else 1e-10)


def test_the_sum_of_the_paper() -> None:
    """Equation 6, with a decay for every token: r_t (diag(u) k_t v_t + sum over i < t of the decays between them)."""
    r, k, v, decay, bonus, _ = make(7)
    o, _ = bonus_linear_attention(r, k, v, decay, bonus)
    for t in range(7):
        expected = torch.einsum("bhk,hk,bhk,bhv->bhv", r[:, t], bonus, k[:, t], v[:, t])
        for i in range(t):
            between = decay[:, i + 1 : t].sum(1).exp()
            expected = expected + torch.einsum("bhk,bhk,bhk,bhv->bhv", r[:, t], between, k[:, i], v[:, i])
        # A handful of float64 terms of order one.
        assert torch.allclose(o[:, t], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (4, (K,), "the bonus must be"),
        (3, (B, 8, H), "log_decay have the H heads"),
        (5, (B, H, V, K), r"initial_state must be \[2, 3, 4, 5\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(index: int, shape: tuple[int, ...], message: str) -> None:
    tensors = make(8)
    tensors[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        bonus_linear_attention(*tensors[:-1], initial_state=tensors[-1])
    with pytest.raises(ValueError, match="B must be 1"):
        bonus_linear_attention(*make(8)[:-1], cu_seqlens=torch.tensor([0, 8]))
