"""The interpreter that `tests.interpreter` makes quicker computes what the plain one does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrecall.ops import gated_delta_rule, gated_linear_attention, short_convolution
from longrecall.ops.norms.op import rms_norm
from tests.interpreter import quicken

pytest.importorskip("triton")
launch = pytest.importorskip("longrecall.ops.kernels.launch")


def kernels(dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of kernels that between them use products, sums, masks, casts, branches and loops."""
    g = torch.Generator().manual_seed(0)
    q, k, v, x = (torch.randn(1, 17, 2, 16, generator=g).to(dtype).requires_grad_() for _ in range(4))
    decay = -torch.rand(1, 17, 2, 16, generator=g)
    rate, taps = torch.rand(1, 17, 2, generator=g).to(dtype), torch.randn(32, 4, generator=g).to(dtype)
    made = [gated_linear_attention(q, k, v, decay, backend="triton")[0]]
    made += [
        gated_delta_rule(q, k, v, None, rate, backend="triton")[0],
        rms_norm(x, torch.ones(16), 1e-6, backend="triton"),
    ]
    made += [short_convolution(v.flatten(2), taps, backend="triton")[0]]
    sum(part.float().sum() for part in made).backward()
    return made + [leaf.grad for leaf in (q, k, v, x)]


@pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1")
# In bfloat16 there are casts too; what all other tests compare with plain torch is mostly float32.
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_quick_is_plain(dtype: torch.dtype, quick_interpreter: pytest.MonkeyPatch) -> None:
    from triton.language import core

    quick, made = kernels(dtype), core.block_type.__init__
    quick_interpreter.undo()
    try:
        assert core.block_type.__init__ is not made
        plain = kernels(dtype)
    finally:
        quicken(quick_interpreter)
    assert all(torch.equal(one, other) for one, other in zip(quick, plain, strict=True))
