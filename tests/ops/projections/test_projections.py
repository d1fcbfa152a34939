"""Products of one input taken together: the same numbers and gradients as one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.norm import RMSNorm
from longrecall.layers.projections import is_biased, is_plain, project, project_gated
from longrecall.ops.projections.biased import project_with_biases
from longrecall.ops.projections.together import project_together


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_products_and_gradients_equal_those_of_single_layers() -> None:
    x, *weights = draw((2, 3, 5), (4, 5), (1, 5), (7, 5))
    found = project_together(x, weights)
    assert all(torch.equal(y, x @ w.T) for y, w in zip(found, weights, strict=True))
    # Finite differences of float64, at torch's own tolerances; of second order too.
    assert torch.autograd.gradcheck(lambda x, *w: project_together(x, w), (x, *weights))
    assert torch.autograd.gradgradcheck(lambda x, *w: project_together(x, w), (x, *weights))


def test_joined_products_and_gradients_equal_those_of_single_layers() -> None:
    x, *weights = draw((2, 3, 5), (4, 5), (1, 5), (7, 5))
    found = project_together(x, weights, joined=2)
    # float64, sums of 5 terms in any order.
    assert all(torch.allclose(y, x @ w.T, rtol=1e-12, atol=1e-14) for y, w in zip(found, weights, strict=True))
    # Finite differences of float64, at torch's own tolerances.
    assert torch.autograd.gradcheck(lambda x, *w: project_together(x, w, joined=2), (x, *weights))
    assert torch.autograd.gradcheck(lambda x, *w: project_together(x, w, joined=3), (x, *weights))
    found[2].sum().backward()
    # Nobody used the first; the second, joined to one that was, has a gradient of nothing.
    assert weights[0].grad is None and not weights[1].grad.any() and weights[2].grad.any()


def test_what_needs_no_gradient_has_none() -> None:
    x, first, second, third = draw((3, 5), (4, 5), (2, 5), (2, 5))
    first.requires_grad_(False)
    outs = project_together(x, (first, second, third))
    (outs[0].sum() + outs[1].square().sum()).backward()
    assert first.grad is None and second.grad is not None and x.grad is not None
    # A product that nobody used gives nothing to x, and its weight nothing that counts.
    assert third.grad is None or not third.grad.any()
    expected = torch.autograd.grad((x @ first.T).sum() + (x @ second.T).square().sum(), x)[0]
    # float64, sums of a few terms.
    assert torch.allclose(x.grad, expected, rtol=1e-12)


def test_biased_products_and_gradients_equal_those_of_single_layers() -> None:
    x, *rest = draw((2, 3, 5), (4, 5), (1, 5), (4,), (1,))
    found = project_with_biases(x, rest[:2], rest[2:])
    assert all(torch.equal(y, F.linear(x, w, b)) for y, w, b in zip(found, rest[:2], rest[2:], strict=True))
    # Finite differences of float64, at torch's own tolerances.
    assert torch.autograd.gradcheck(lambda x, *rest: project_with_biases(x, rest[:2], rest[2:]), (x, *rest))
    found[1].sum().backward()
    # Nobody used the first one; the bias of the other adds up the rows.
    assert rest[0].grad is None and rest[2].grad is None
    assert rest[3].grad is not None and rest[3].grad.item() == 6.0


class Watched(nn.Linear):
    """Something that is more than a product."""


def test_only_plain_layers_are_products_with_their_weights() -> None:
    plain = nn.Linear(5, 4, bias=False)
    hooked = nn.Linear(5, 4, bias=False)
    hooked.register_forward_hook(lambda _module, _inputs, output: output)
    assert is_plain(plain)
    assert not any(map(is_plain, (hooked, Watched(5, 4, bias=False), nn.Linear(5, 4), nn.Identity())))
    assert is_biased(nn.Linear(5, 4)) and not is_biased(plain) and not is_biased(Watched(5, 4))
    x = torch.randn(3, 5)
    found = project(x, {"a": plain, "b": hooked})
    assert list(found) == ["a", "b"] and torch.equal(found["a"], plain(x))


@pytest.mark.parametrize("what", ["backward", "before the backward", "forward"])
def test_what_others_put_into_a_layer_is_called(what: str) -> None:
    """Backward hooks, and a forward method of its own: accelerate's way to bring weights from elsewhere."""
    plain, biased = nn.Linear(4, 3, bias=False), nn.Linear(4, 3)
    assert is_plain(plain) and is_biased(biased)
    calls: list[str] = []
    for layer in (plain, biased):
        if what == "backward":
            layer.register_full_backward_hook(lambda *_: calls.append(what))
        elif what == "before the backward":
            layer.register_full_backward_pre_hook(lambda *_: calls.append(what))
        else:
            own = layer.forward
            layer.forward = lambda x, own=own: calls.append(what) or own(x)  # type: ignore[method-assign]
    assert not is_plain(plain) and not is_biased(biased)
    x, gate = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    project_gated(x, RMSNorm(4), gate, plain, x.dtype).sum().backward()
    assert calls == [what]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_on_a_gpu_share_one_gradient(autocast: bool) -> None:
    layers = {str(n): nn.Linear(16, n, bias=False).cuda() for n in (8, 24)}
    x = torch.randn(40, 16, device="cuda", requires_grad=True)
    leaves = [x, *(layer.weight for layer in layers.values())]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = project(x, layers)
        single = {name: layer(x) for name, layer in layers.items()}
    assert type(found["8"].grad_fn).__name__ == "_ProjectTogetherBackward"
    for name, y in single.items():
        assert found[name].dtype == y.dtype
        # The same product of the same operands; cuBLAS may choose another order of 16 terms.
        assert torch.allclose(found[name], y, rtol=1e-2 if autocast else 1e-5, atol=1e-5)
    weights = {name: torch.randn_like(y) for name, y in single.items()}
    gradients = torch.autograd.grad([found[n] for n in layers], leaves, [weights[n] for n in layers])
    expected = torch.autograd.grad([single[n] for n in layers], leaves, [weights[n] for n in layers])
    for a, b in zip(gradients, expected, strict=True):
        # float32 sums of up to 40 terms; bfloat16 rounds each of two products, or their sum, to 4e-3 at worst.
        assert float((a - b).norm() / b.norm()) < (1e-2 if autocast else 1e-5)
