"""What the hand-written backward of the chunked gated delta rule must keep, beyond equality with the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrecall.ops import gated_delta_rule
from longrecall.ops.delta_rule import chunked as chunked_delta
from tests.ops.test_recurrences import make, outputs_and_gradients, relative_error


def test_repeated_keys_stay_exact_in_float32() -> None:
    # The same key at every step with beta 1 makes L all ones: powers of L reach 1e18, its inverse has only 1 and -1.
    op, (q, k, v, decay, beta, state) = make("gated_delta", 130, torch.float32, strength=1e-3)
    inputs = [q, k[:, :1].expand_as(k).contiguous(), v, decay, torch.ones_like(beta), state]
    expected = outputs_and_gradients(op, [x.double() for x in inputs], "reference")
    found = [x.double() for x in outputs_and_gradients(op, inputs, "chunked")]
    # float32 sums of at most 130 terms of order one.
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("wanted", range(6))
def test_each_input_alone_may_ask_for_its_gradient(wanted: int) -> None:
    op, inputs = make("gated_delta", 70, torch.float64)
    everything = outputs_and_gradients(op, inputs, "chunked")[2:]
    leaf = inputs[wanted].clone().requires_grad_()
    *tensors, state = [leaf if n == wanted else x for n, x in enumerate(inputs)]
    o, final = op(*tensors, initial_state=state, backend="chunked")
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sin() for x in (o, final)]
    ((o * weights[0]).sum() + (final * weights[1]).sum()).backward()
    assert torch.equal(leaf.grad, everything[wanted])


@pytest.mark.parametrize("part", [0, 1])
def test_a_loss_on_one_output_alone(part: int) -> None:
    _, inputs = make("gated_delta", 70, torch.float64)
    gradients = []
    for backend in ("reference", "chunked"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = gated_delta_rule(*leaves[:-1], initial_state=leaves[-1], backend=backend)[part]
        found = torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)
        # The final state does not depend on q: None from the loop, zeros from the one node.
        gradients.append([torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)])
    assert relative_error(gradients[1], gradients[0]) < 1e-12


def test_without_gradients_no_graph_is_built() -> None:
    op, inputs = make("gated_delta", 70, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        o, final = op(*leaves[:-1], initial_state=leaves[-1], backend="chunked")
    assert not o.requires_grad and not final.requires_grad


def test_gradients_are_those_of_float32_inside_autocast() -> None:
    op, inputs = make("gated_delta", 70, torch.float32)
    expected = outputs_and_gradients(op, inputs, "chunked")
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs_and_gradients(op, inputs, "chunked")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_strided_inputs_give_the_same_gradients() -> None:
    op, inputs = make("gated_delta", 70, torch.float64)
    strided = [x.movedim(1, -1).contiguous().movedim(-1, 1) for x in inputs]
    expected, found = (outputs_and_gradients(op, x, "chunked") for x in (inputs, strided))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_depends_on_values() -> None:
    # Tensors without data: reading a value or choosing by one, which a CUDA graph forbids, fails on them.
    _, inputs = make("gated_delta", 600, torch.float32)
    *tensors, state = [x.to("meta").requires_grad_() for x in inputs]
    o, final = chunked_delta.gated_delta_rule(*tensors, scale=1.0, state=state)
    gradients = torch.autograd.grad(o.sum() + final.sum(), [*tensors, state])
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("chunks", [1, 3])
def test_segments_hand_over_their_states(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Five chunks of 64 tokens: five segments of one, or one of three and one of two.
    op, inputs = make("gated_delta", 300, torch.float64)
    expected = outputs_and_gradients(op, inputs, "reference")
    batch, _, heads, width = inputs[2].shape
    matrix = batch * heads * 64 * max(width, inputs[1].shape[-1])
    monkeypatch.setattr(chunked_delta, "SEGMENT_NUMBERS_CPU", chunks * matrix)
    found = outputs_and_gradients(op, inputs, "chunked")
    # Sums of 300 float64 terms in another order: a few hundred ulps at most.
    assert relative_error(found, expected) < 1e-12
    with torch.no_grad():
        alone = op(*inputs[:-1], initial_state=inputs[-1], backend="chunked")
    assert all(torch.equal(a, b) for a, b in zip(alone, found[:2], strict=True))


def test_segments_are_as_large_as_the_caches_allow() -> None:
    def lengths(*shape: int) -> list[int]:
        k = torch.empty(shape)
        return [len(x) for x in chunked_delta._segments(k, k, 64)]

    # 8 heads x 64 tokens x 128 numbers four times are the 2**18 of a segment.
    assert lengths(1, 320, 8, 128) == [4, 1]
    assert lengths(2, 320, 8, 128) == [2, 2, 1]
    assert lengths(4, 320, 8, 128) == lengths(8, 320, 8, 128) == [1] * 5
    assert lengths(1, 320, 2, 32) == [5]


def strictly_lower(size: int, strength: float) -> Tensor:
    g = torch.Generator().manual_seed(size)
    # A view of twice as many rows, as the scores are.
    return strength * torch.randn(3, 2 * size, size, generator=g, dtype=torch.float64).tril(-1)[:, :size]


@pytest.mark.parametrize("size", [16, 32, 64])
def test_inverse_of_chunks_in_blocks(size: int) -> None:
    lower = strictly_lower(size, 0.3)
    out = torch.full((3, size, size), float("nan"), dtype=torch.float64)
    # What stands on the diagonal and above it, as in the scores, is not to count.
    chunked_delta._invert(lower + torch.ones_like(lower).triu(), out)
    identity = torch.eye(size, dtype=torch.float64)
    # Entries grow to about 1e3 here; float64 leaves twelve digits of a product that cancels to the identity.
    assert ((identity + lower) @ out - identity).abs().max() < 1e-10
    assert not out.triu(1).any()


def test_chunk_sizes_halve_down_to_blocks() -> None:
    sizes = [chunked_delta._chunk_size(length) for length in (1, 16, 17, 33, 48, 64, 65, 10_000)]
    assert sizes == [16, 16, 32, 64, 64, 64, 64, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_neither_overflow_nor_underflow(dtype: torch.dtype) -> None:
    # 64 tokens that forget all: exponents between two of them reach 64 x 30 (float32) or 64 x 700 either way.
    _, (q, k, _, _, beta, _) = make("gated_delta", 64, dtype)
    decay, beta = (x[..., None] for x in (torch.full_like(beta, -700.0 if dtype == torch.float64 else -30.0), beta))
    gates = chunked_delta._gates(decay, beta, 64)
    q, k = (chunked_delta._by_chunk(x[:, :, :1].expand(-1, -1, beta.shape[2], -1), 64) for x in (q, k))
    chunks = chunked_delta._lay_out(q, k, 1.0, gates)
    least = torch.finfo(dtype).tiny
    for x in (gates.rows, gates.keys, gates.total, chunks.decay):
        assert x.isfinite().all() and x.abs().max() <= 1
        assert ((x == 0) | (x.abs() >= least)).all()
