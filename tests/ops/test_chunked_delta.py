"""What the hand-written backward of the chunked gated delta rule must keep, beyond equality with the reference."""

from __future__ import annotations

import pytest
import torch

from longrecall.ops import chunked_delta, gated_delta_rule

from .test_recurrences import make, outputs_and_gradients, relative_error


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
