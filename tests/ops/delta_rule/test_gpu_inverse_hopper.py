"""The inverse in Gluon on a Hopper GPU, against float64 and against the plain kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrecall.ops.delta_rule.triton import chunked as delta_rule
from longrecall.ops.delta_rule.triton.plan import plan_of
from longrecall.ops.kernels import hopper
from tests.ops.delta_rule.test_hopper_inverse import CASES, check, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.why_not(torch.zeros(1, device="cuda").bfloat16()) is not None,
        reason="needs a Hopper GPU and the Triton that the kernels are written for",
    ),
]

ON_A_GPU = [
    *CASES,
    (1, 640, 2, 2, 128, "equal"),
    (2, 1000, 4, 8, 128, "close"),
    (3, 2500, 16, 16, 128, "random"),
    (1, 333, 2, 4, 64, "strong"),
    (1, 300, 2, 2, 256, "equal"),
]


def solve(k: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The inverses ``[B, H, chunks, C, C]`` and cumulative log decays ``[B, H, chunks, C]`` as the layers get them."""
    v = torch.empty((*beta.shape, 64), dtype=k.dtype, device=k.device)
    inverse, cumulative = delta_rule._invert(plan_of(k, v, beta, 1.0), k, log_decay, beta)
    return inverse.unflatten(2, (-1, 64)), cumulative.unflatten(2, (-1, 64))


@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_it_is_the_inverse(case: tuple[int, int, int, int, int, str]) -> None:
    inputs = k, log_decay, beta = tuple(x.cuda() for x in draw(*case))
    check(solve(k, log_decay, beta), (k, log_decay, beta))
    assert all(torch.equal(one, other) for one, other in zip(solve(*inputs), solve(*inputs), strict=True))


def test_it_rounds_as_the_plain_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    k, log_decay, beta = (x.cuda() for x in draw(3, 2500, 16, 16, 128, "random"))
    found = solve(k, log_decay, beta)
    monkeypatch.setenv(hopper.SWITCH, "0")
    other = solve(k, log_decay, beta)
    # Sums in another order, and pairs of bfloat16: now and then the last rounding goes to the other neighbour.
    assert float((found[0] != other[0]).float().mean()) < 5e-3
    assert torch.allclose(found[0].float(), other[0].float(), rtol=2**-7, atol=2**-14)
    assert torch.allclose(found[1], other[1], rtol=4e-7, atol=1e-6)
