"""The gates of Gated DeltaNet in Triton's CPU interpreter, against float64: results and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.ops.delta_rule.gates import delta_gates
from tests.ops.norms.test_triton_normalisation import check, draw, interpreted, launch

gates = pytest.importorskip("longrecall.ops.delta_rule.triton.gates")


def both(decay: Tensor, write: Tensor, log_rate: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return delta_gates(decay, write, log_rate, bias, 2.0, **options)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 37, 3), (1, 1, 8), (50, 1)])
def test_gates(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "TILE", 32)
    heads = (shape[-1],)
    check(both, draw(dtype, shape, shape, heads, heads), dtype)


@interpreted
def test_extreme_gates() -> None:
    raw = torch.linspace(-120, 120, 481)[:, None].repeat(1, 2)
    leaves = [raw, raw.clone(), torch.tensor([-3.0, 2.5]), torch.zeros(2)]
    found = both(*leaves, backend="triton")
    expected = both(*(x.double() for x in leaves), backend="reference")
    for one, other in zip(found, expected, strict=True):
        # A handful of float32 operations, the logarithm among them; below float32's normal numbers, its least steps.
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=1e-37)


@interpreted
def test_gates_read_parts_of_wider_rows_where_they_lie() -> None:
    wide, (rate, bias) = draw(torch.float32, (4, 9, 10))[0], draw(torch.float32, (3,), (3,), seed=1)
    decay, write = wide[..., 2:5], wide[..., 6:9]
    found = both(decay, write, rate, bias, backend="triton")
    expected = both(decay.contiguous(), write.contiguous(), rate, bias, backend="triton")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_too_many_heads_are_left_to_torch() -> None:
    raw = torch.zeros(1, 1 + gates.MOST_HEADS)
    assert "too many" in str(gates.why_not(raw, raw))
    if launch.interpreting():
        with pytest.raises(ValueError, match="too many"):
            both(raw, raw, raw[0], raw[0], backend="triton")
