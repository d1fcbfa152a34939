"""The short convolution against torch's Conv1d, with states, padding and packing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.ops import long_convolution, short_convolution
from longrecall.ops.execution import padding_at_the_end

# float64 throughout: only the order of four additions differs.
TOLERANCE = 1e-12


def random_case(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in ((3, length, 6), (6, 4), (6,)))  # type: ignore[return-value]


def test_equals_a_depthwise_conv1d() -> None:
    x, weight, bias = random_case(11)
    y, _ = short_convolution(x, weight, bias, activation=None)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6).transpose(1, 2)
    assert torch.allclose(y, expected, atol=TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 12), cut=st.integers(1, 11), seed=st.integers(0, 99))
def test_a_carried_state_equals_one_pass(length: int, cut: int, seed: int) -> None:
    x, weight, bias = random_case(length, seed)
    cut = min(cut, length - 1)
    whole, final = short_convolution(x, weight, bias)
    first, middle = short_convolution(x[:, :cut], weight, bias)
    second, last = short_convolution(x[:, cut:], weight, bias, state=middle)
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=TOLERANCE)
    assert torch.equal(last, final)


@settings(max_examples=40, deadline=None)
@given(bits=st.lists(st.booleans(), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_padding_anywhere_is_as_if_not_there(bits: list[bool], seed: int) -> None:
    x, weight, bias = random_case(len(bits), seed)
    state = torch.randn(3, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    mask = torch.tensor(bits).expand(3, -1)
    x_poisoned = x.masked_fill(~mask[..., None], float("nan"))
    y, final = short_convolution(x_poisoned, weight, bias, state=state, mask=mask)
    kept, expected_final = short_convolution(x[:, bits], weight, bias, state=state)
    assert torch.allclose(y[:, bits], kept, atol=TOLERANCE)
    assert torch.equal(final, expected_final)


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_padding_known_to_come_last_is_not_sorted(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(count)
    x, weight, state = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((2, 9, 3), (3, 4), (2, 3, 3))
    )
    mask = (torch.arange(9) < count).expand(2, -1)
    history = state.transpose(1, 2)
    short = short_convolution(x, weight, state=state, mask=mask)
    long = long_convolution(x, weight, history=history, mask=mask, grow=False)
    with padding_at_the_end(mask), monkeypatch.context() as patch:
        patch.setattr(torch, "argsort", None)
        for found, expected in (
            (short_convolution(x, weight, state=state, mask=mask), short),
            (long_convolution(x, weight, history=history, mask=mask, grow=False), long),
        ):
            torch.testing.assert_close(found[0][:, :count], expected[0][:, :count], rtol=0, atol=0)
            torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
        # Another mask may hide tokens anywhere.
        with pytest.raises(TypeError):
            short_convolution(x, weight, state=state, mask=mask.clone())


def test_packed_documents_have_states_of_their_own() -> None:
    x, weight, bias = random_case(9)
    y, finals = short_convolution(x[:1], weight, bias, cu_seqlens=torch.tensor([0, 2, 9]))
    for row, (a, b) in enumerate(((0, 2), (2, 9))):
        alone, final = short_convolution(x[:1, a:b], weight, bias)
        assert torch.allclose(y[:, a:b], alone, atol=TOLERANCE)
        assert torch.equal(finals[row], final[0])


def test_every_gradient_is_that_of_plain_autograd() -> None:
    x, weight, bias = random_case(7)
    state = torch.randn(3, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, state)]

    def both(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return short_convolution(x, weight, bias, state=state)

    # Finite differences of float64, at torch's own tolerances.
    assert torch.autograd.gradcheck(both, leaves)
