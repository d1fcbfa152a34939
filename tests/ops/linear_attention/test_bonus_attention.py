"""RWKV's linear attention, made of gated linear attention, against its own loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 100), cut=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_carried_state_equals_one_pass(length: int, cut: float, seed: int) -> None:
    *tensors, bonus, state = make(length, seed)
    at = max(1, min(length - 1, round(cut * length)))
    whole, final = bonus_linear_attention(*tensors, bonus, initial_state=state)
    first, middle = bonus_linear_attention(*(x[:, :at] for x in tensors), bonus, initial_state=state)
    second, last = bonus_linear_attention(*(x[:, at:] for x in tensors), bonus, initial_state=middle)
    # The same sums, cut elsewhere into chunks or steps.
    assert relative_error([torch.cat([first, second], 1), last], [whole, final]) < 1e-12


def test_packed_documents_do_not_see_each_other() -> None:
    *tensors, bonus, _ = make(40, batch=1)
    cuts = torch.tensor([0, 1, 18, 40])
    packed, finals = bonus_linear_attention(*tensors, bonus, cu_seqlens=cuts)
    for n, (a, b) in enumerate(itertools.pairwise(cuts)):
        o, final = bonus_linear_attention(*(x[:, a:b] for x in tensors), bonus)
        assert relative_error([packed[:, a:b], finals[n : n + 1]], [o, final]) < 1e-12


def test_low_precision_and_an_empty_sequence() -> None:
    tensors = [tensor.bfloat16() for tensor in make(20)]
    o, final = bonus_linear_attention(*tensors[:-1], initial_state=tensors[-1])
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    _, expected = reference.bonus_linear_attention(*(tensor.double() for tensor in tensors))
    # The inputs are rounded before both: what is left is float32 arithmetic.
    assert relative_error([final.double()], [expected]) < 1e-5
    *empty, bonus, state = make(0)
    o, final = bonus_linear_attention(*empty, bonus, initial_state=state)
    assert o.shape == (B, 0, H, V) and torch.equal(final, state)


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
