"""Walks in segments side by side on a GPU: chosen by size and forced, against float64 and against one piece."""

from __future__ import annotations

import pytest
import torch

from longrecall.ops import gated_linear_attention
from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from longrecall.ops.kernels import launch
from tests.ops.delta_rule.test_triton_delta import TOLERANCE, errors, make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def force(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    def segments(programs: int, chunks: int, processors: int, *, products: bool = False) -> int:
        return -(-chunks // -(-chunks // min(count, chunks)))

    monkeypatch.setattr(launch, "segments", segments)


def delta_inputs(dtype: torch.dtype, K: int = 128) -> list[torch.Tensor]:
    # Hardly any decay, so that what the first segment leaves is read in the last.
    return [x.cuda() for x in make({"B": 1, "H": 2, "E": 2, "R": 2, "K": K, "V": 128}, 2000, dtype, 1e-3)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_chosen_for_one_row_equals_float64_with_gradients(dtype: torch.dtype) -> None:
    assert launch.segments(16, 32, launch.processors(torch.empty(0, device="cuda")), products=True) > 1
    found = errors(delta_inputs(dtype))
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize(("dtype", "K"), [*((dtype, 128) for dtype in TOLERANCE), (torch.bfloat16, 256)])
def test_the_delta_rule_in_segments_equals_one_piece(
    dtype: torch.dtype, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = delta_inputs(dtype, K)

    def outputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        force(monkeypatch, count)
        return subhead_delta_rule(*inputs[:5], weights=inputs[5], initial_state=inputs[6], backend="triton")

    whole = outputs(1)
    for count in (2, 3, 8, 16, 32):
        for found, expected in zip(outputs(count), whole, strict=True):
            # Both are within the tolerance of float64.
            assert float((found - expected).norm() / expected.norm()) < 2 * TOLERANCE[dtype], count


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decays", ["head", "channel", "none"])
def test_linear_attention_in_segments_equals_one_piece(
    decays: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, device="cuda")

    q, k, v = (randn(2, 1500, 2, 128).to(dtype) * 0.1 for _ in range(3))
    shape = {"head": (2, 1500, 2), "channel": (2, 1500, 2, 128)}
    decay = None if decays == "none" else -0.002 * randn(*shape[decays]).abs()
    state = randn(2, 2, 128, 128)

    def outputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        force(monkeypatch, count)
        return gated_linear_attention(q, k, v, decay, initial_state=state, backend="triton")

    whole = outputs(1)
    for count in (2, 5, 24):
        for found, expected in zip(outputs(count), whole, strict=True):
            # A state between chunks is rounded to the products' dtype, in another order perhaps the other way.
            assert float((found - expected).norm() / expected.norm()) < TOLERANCE[dtype] / 2, count
