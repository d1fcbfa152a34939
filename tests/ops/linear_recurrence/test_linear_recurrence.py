"""The linear recurrence and RWKV-4's weighted average, in chunks against their loops and against their formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from longrecall.ops import linear_recurrence, weighted_average

Op = Callable[..., tuple[Tensor, Tensor]]


def recurrence_inputs(length: int, strength: float = 1.0, batch: int = 2, channels: int = 5) -> list[Tensor]:
    """x, log_decay and the initial state; decays of up to `strength` a token."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, channels, generator=g, dtype=torch.float64)
    decay = -strength * torch.rand(batch, length, channels, generator=g, dtype=torch.float64)
    return [x, decay, torch.randn(batch, channels, generator=g, dtype=torch.float64)]


def average_inputs(length: int, strength: float = 1.0, batch: int = 2, channels: int = 5) -> list[Tensor]:
    """k, v, log_decay, bonus and the initial state of which one channel has read nothing."""
    g = torch.Generator().manual_seed(0)
    k, v = strength * torch.randn(2, batch, length, channels, generator=g, dtype=torch.float64)
    decay = -strength * torch.rand(batch, length, channels, generator=g, dtype=torch.float64)
    state = torch.randn(batch, 3, channels, generator=g, dtype=torch.float64)
    state[:, 2] = (torch.arange(channels) > 0).double()
    state[:, :, 0] = 0
    return [k, v, decay, torch.randn(channels, generator=g, dtype=torch.float64), state]


OPS: dict[str, tuple[Op, Callable[..., list[Tensor]]]] = {
    "linear_recurrence": (linear_recurrence, recurrence_inputs),
    "weighted_average": (weighted_average, average_inputs),
}
EVERY = pytest.mark.parametrize("name", OPS)


def outputs_and_gradients(op: Op, tensors: list[Tensor], backend: str) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y, final = op(*leaves[:-1], initial_state=leaves[-1], backend=backend)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x).sin() for x in (y, final)]
    ((y * weights[0]).sum() + (final * weights[1]).sum()).backward()
    return [y.detach(), final.detach(), *(leaf.grad for leaf in leaves)]


def largest_error(found: list[Tensor], expected: list[Tensor], floor: float = 1e-12) -> float:
    """Over all tensors, relative to the largest entry of each (at least `floor`); NaN counts as infinite."""
    errors = [
        float((a.double() - b).abs().max() / max(float(b.abs().max()), floor))
        for a, b in zip(found, expected, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)


@EVERY
@pytest.mark.parametrize("length", [1, 5, 16, 17, 130])
def test_chunks_equal_the_loop_in_float64(name: str, length: int) -> None:
    op, make = OPS[name]
    tensors = make(length)
    expected = outputs_and_gradients(op, tensors, "reference")
    # Sums of at most 130 float64 terms in another order.
    assert largest_error(outputs_and_gradients(op, tensors, "chunked"), expected) < 1e-12


def test_the_average_is_that_of_the_formula() -> None:
    k, v, decay, bonus, _ = average_inputs(9)
    found, final = weighted_average(k, v, decay[0, 0], bonus)
    w = decay[0, 0]
    for t in range(9):
        weights = torch.stack([torch.exp((t - 1 - i) * w + k[:, i]) for i in range(t)] + [torch.exp(bonus + k[:, t])])
        expected = (weights * v[:, : t + 1].transpose(0, 1)).sum(0) / weights.sum(0)
        # float64, another order of sums and logarithms between.
        torch.testing.assert_close(found[:, t], expected, rtol=1e-12, atol=1e-12)
    total = sum(torch.exp((8 - i) * w + k[:, i]) for i in range(9))
    torch.testing.assert_close(final[:, 1].exp(), total, rtol=1e-12, atol=1e-12)
    assert bool((final[:, 2] == 1).all())


@EVERY
def test_gradients_equal_finite_differences(name: str) -> None:
    op, make = OPS[name]
    tensors = [tensor.requires_grad_() for tensor in make(6, batch=1)]
    if name == "weighted_average":
        # The mark of what was read is no number that a small step changes.
        mark = tensors[-1].detach()[:, 2:]
        tensors[-1] = tensors[-1].detach()[:, :2].requires_grad_()

        def run(*given: Tensor) -> tuple[Tensor, Tensor]:
            out, final = op(*given[:-1], initial_state=torch.cat([given[-1], mark], 1), backend="chunked")
            return out, final[:, :2]

        assert gradcheck(run, tensors)
    else:
        assert gradcheck(lambda *given: op(*given[:-1], initial_state=given[-1], backend="chunked"), tensors)


@EVERY
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e3])
def test_extreme_decays_and_keys_stay_finite_and_right(name: str, backend: str, strength: float) -> None:
    op, make = OPS[name]
    tensors = make(130, strength)
    expected = outputs_and_gradients(op, tensors, "reference")
    found = outputs_and_gradients(op, [tensor.float() for tensor in tensors], backend)
    # float32: an exponent of 1e3 is rounded to 6e-5, and the averages are of values as large. The floor: where all is
    # forgotten at once the gradient of a decay is next to nothing, and 0 is as good.
    assert largest_error(found, expected, floor=1.0) < 1e-5 * max(1.0, strength / 20)


@EVERY
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_state_hands_over(name: str, backend: str) -> None:
    op, make = OPS[name]
    *tensors, state = make(40)
    sequence, constants = (tensors, []) if name == "linear_recurrence" else (tensors[:3], tensors[3:])
    whole, final = op(*tensors, initial_state=state, backend=backend)
    first, between = op(*(x[:, :13] for x in sequence), *constants, initial_state=state, backend=backend)
    second, last = op(*(x[:, 13:] for x in sequence), *constants, initial_state=between, backend=backend)
    # float64, chunks cut elsewhere.
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-12)


@EVERY
@pytest.mark.parametrize("backend", [None, "reference"])
def test_packed_documents_are_apart(name: str, backend: str | None) -> None:
    op, make = OPS[name]
    *tensors, _ = make(20, batch=1)
    sequence, constants = (tensors, []) if name == "linear_recurrence" else (tensors[:3], tensors[3:])
    ends = torch.tensor([0, 3, 14, 20])
    found, finals = op(*tensors, cu_seqlens=ends, backend=backend)
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        expected, final = op(*(x[:, start:end] for x in sequence), *constants, backend=backend)
        # float64, chunks cut elsewhere.
        torch.testing.assert_close(found[:, start:end], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(finals[row : row + 1], final, rtol=1e-12, atol=1e-12)


@EVERY
def test_low_precision_inputs_keep_a_float32_state(name: str) -> None:
    op, make = OPS[name]
    tensors = [tensor.bfloat16() for tensor in make(70)]
    out, final = op(*tensors[:-1], initial_state=tensors[-1])
    expected, exact = op(*(tensor.double() for tensor in tensors[:-1]), initial_state=tensors[-1].double())
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    # Outputs are rounded to 8 bits once; states are not.
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(final.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_key_without_weight_is_padding(backend: str) -> None:
    k, v, decay, bonus, state = average_inputs(12)
    real = torch.tensor([True, False, True, True, False, True] * 2)
    state[1] = 0
    padded = [torch.where(real[:, None], k, -1e30), v, decay * real[:, None]]
    out, final = weighted_average(*padded, bonus, initial_state=state, backend=backend)
    expected, after = weighted_average(*(x[:, real] for x in (k, v, decay)), bonus, initial_state=state)
    # float64, another order of sums.
    torch.testing.assert_close(out[:, real], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, after, rtol=1e-12, atol=1e-12)
    nothing = [torch.full_like(k, -1e30), v, torch.zeros_like(decay)]
    _, untouched = weighted_average(*nothing, bonus, initial_state=state, backend=backend)
    assert torch.equal(untouched, state)


def test_bad_shapes_are_refused() -> None:
    x = torch.ones(2, 3, 4)
    calls: list[Any] = [
        lambda: linear_recurrence(x, x[:, :2]),
        lambda: linear_recurrence(x, x, initial_state=torch.ones(2, 3)),
        lambda: linear_recurrence(x, x, cu_seqlens=torch.tensor([0, 3])),
        lambda: weighted_average(x, x, x, torch.ones(3)),
        lambda: weighted_average(x, x, x, torch.ones(4), initial_state=torch.ones(2, 4)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must be"):
            call()
    empty, state = linear_recurrence(x[:, :0], x[:, :0])
    assert empty.shape == (2, 0, 4) and torch.equal(state, torch.zeros(2, 4))
