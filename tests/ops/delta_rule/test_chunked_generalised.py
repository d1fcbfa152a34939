"""What the chunked delta rules with a decay per key channel must keep, beyond equality with the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from longrecall.ops import gated_delta_rule, generalised_delta_rule
from longrecall.ops.delta_rule import chunked_generalised
from longrecall.ops.delta_rule.chunked_generalised import causal_scores
from tests.ops.test_recurrences import make, outputs_and_gradients, relative_error

BOTH = ["channel_delta", "generalised_delta"]


def test_repeated_keys_stay_exact_in_float32() -> None:
    # The same key at every step with beta 1: powers of (k, k) reach 1e18, the inverse has entries of order one.
    op, (q, k, v, decay, beta, state) = make("channel_delta", 130, torch.float32, strength=1e-3)
    inputs = [q, k[:, :1].expand_as(k).contiguous(), v, decay, torch.ones_like(beta), state]
    expected = outputs_and_gradients(op, [x.double() for x in inputs], "reference")
    found = [x.double() for x in outputs_and_gradients(op, inputs, "chunked")]
    # float32 sums of at most 130 terms of order one.
    assert relative_error(found, expected) < 1e-5


def test_equal_channels_are_the_rule_with_one_decay_per_head() -> None:
    op, (q, k, v, decay, beta, state) = make("gated_delta", 130, torch.float64)
    channels = decay[..., None].expand_as(k)
    expected, found = (op(q, k, v, g, beta, initial_state=state) for g in (decay, channels))
    assert relative_error(list(found), list(expected)) < 1e-12


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_the_gated_rule_is_a_generalised_one(backend: str) -> None:
    op, (q, k, v, decay, beta, state) = make("channel_delta", 130, torch.float64)
    expected = op(q, k, v, decay, beta, initial_state=state, backend=backend)
    written = beta[..., None] * k
    found = generalised_delta_rule(q, written, v, decay, k * decay.exp(), written, initial_state=state, backend=backend)
    assert relative_error(list(found), list(expected)) < 1e-12


@pytest.mark.parametrize("case", BOTH)
def test_key_heads_shared_by_value_heads(case: str) -> None:
    op, inputs = make(case, 70, torch.float64)
    # One key head serves two value heads; beta has a value for each of those.
    shared = [x[:, :, ::2] if i != 2 and x.shape[-1] == 5 and x.dim() == 4 else x for i, x in enumerate(inputs[:-1])]
    expanded = [x.repeat_interleave(2, dim=2) if x.shape[2] == 2 else x for x in shared]
    expected = op(*expanded, initial_state=inputs[-1], backend="reference")
    for backend in ("reference", "chunked"):
        found = op(*shared, initial_state=inputs[-1], backend=backend)
        assert relative_error(list(found), list(expected)) < 1e-12


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("wanted", range(7))
def test_each_input_alone_may_ask_for_its_gradient(case: str, wanted: int) -> None:
    op, inputs = make(case, 70, torch.float64)
    wanted = min(wanted, len(inputs) - 1)
    everything = outputs_and_gradients(op, inputs, "chunked")[2:]
    leaf = inputs[wanted].clone().requires_grad_()
    *tensors, state = [leaf if n == wanted else x for n, x in enumerate(inputs)]
    o, final = op(*tensors, initial_state=state, backend="chunked")
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sin() for x in (o, final)]
    ((o * weights[0]).sum() + (final * weights[1]).sum()).backward()
    # The same sums; autograd may add them up in another order.
    assert relative_error([leaf.grad], [everything[wanted]]) < 1e-12


@pytest.mark.parametrize("case", BOTH)
def test_nothing_depends_on_values(case: str) -> None:
    # Tensors without data: reading a value or choosing by one, which a CUDA graph forbids, fails on them.
    _, inputs = make(case, 600, torch.float32)
    *tensors, state = [x.to("meta").requires_grad_() for x in inputs]
    function = {"channel_delta": chunked_generalised.gated_delta_rule}.get(
        case, chunked_generalised.generalised_delta_rule
    )
    o, final = function(*tensors, scale=1.0, state=state)
    gradients = torch.autograd.grad(o.sum() + final.sum(), [*tensors, state])
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("case", BOTH)
def test_without_gradients_no_graph_is_built(case: str) -> None:
    op, inputs = make(case, 70, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        o, final = op(*leaves[:-1], initial_state=leaves[-1], backend="chunked")
    assert not o.requires_grad and not final.requires_grad


def peak_bytes(case: str, length: int) -> int:
    """Most bytes that forward and backward hold at once beside their inputs, from the allocator's own records."""
    op, inputs = make(case, length, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        o, final = op(*leaves[:-1], initial_state=leaves[-1], backend="chunked")
        (o.sum() + final.sum()).backward()
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert changes, "the profiler recorded no allocation"
    return max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("case", BOTH)
def test_training_memory_is_linear_and_small(case: str) -> None:
    short, long = peak_bytes(case, 1024), peak_bytes(case, 4096)
    # Whole segments: a + b T with a >= 0 gives 4 at most. What is computed again, the larger part, counts once.
    assert long <= 4.05 * short
    _, inputs = make(case, 4096, torch.float32)
    every_score = 4 * inputs[0].shape[0] * inputs[0].shape[2] * 4096 * chunked_generalised.CHUNK
    # Kept scores of all chunks would be several of these, on top of as many tensors of the size of the inputs.
    sizes = sum(x.numel() * x.element_size() for x in inputs)
    assert long < 6 * sizes + every_score


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 64), strength=st.floats(0, 60), seed=st.integers(0, 99))
def test_scores_of_any_block_are_the_sum_over_channels(size: int, strength: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randn(2, size, 3, generator=g, dtype=torch.float64) for _ in range(2))
    cumulative = -strength * torch.rand(2, size, 3, generator=g, dtype=torch.float64).cumsum(1)
    expected = torch.zeros(2, size, size, dtype=torch.float64)
    for i, j in itertools.product(range(size), range(size)):
        if j <= i:
            weight = (cumulative[:, i] - cumulative[:, j]).exp()
            expected[:, i, j] = (rows[:, i] * columns[:, j] * weight).sum(-1)
    found = causal_scores(rows, columns, cumulative)
    # A product of two exponentials for one of a sum that reaches 60 * 64: its roundings are relative to that.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["log_decay", "removal", "replacement"])
def test_shapes_that_do_not_fit_are_named(name: str) -> None:
    names = ("q", "k", "v", "log_decay", "removal", "replacement")
    shapes = {n: torch.zeros(2, 8, 4, 5) for n in names} | {name: torch.zeros(2, 8, 4)}
    with pytest.raises(ValueError, match=rf"{name} must be \[2, 8, 4, 5\] as the keys; got \[2, 8, 4\]"):
        generalised_delta_rule(**shapes)
    q = torch.zeros(2, 8, 4, 5)
    with pytest.raises(ValueError, match="log_decay must be"):
        gated_delta_rule(q, q, q, torch.zeros(2, 8, 4, 4), torch.zeros(2, 8, 4))
