"""The fast backends on a GPU against float64: outputs, final state, every gradient."""

from __future__ import annotations

import pytest
import torch

from longrecall.ops import gated_linear_attention
from tests.ops.linear_attention.test_triton_linear import CASES as LINEAR
from tests.ops.linear_attention.test_triton_linear import errors, keep_wide, run
from tests.ops.test_recurrences import CASES, make, outputs_and_gradients, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(inputs: list) -> list:
    return [None if x is None else x.cuda() for x in inputs]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [5, 64, 130, 1100])
def test_chunked_equals_reference(case: str, length: int) -> None:
    op, inputs = make(case, length, torch.float32)
    wide = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(op, wide, "reference" if length < 1000 else "chunked")
    found = [x.double().cpu() for x in outputs_and_gradients(op, on_gpu(inputs), "chunked")]
    # float32 sums of up to a thousand terms, without tensor-float-32 (torch's default).
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_extreme_decays(case: str) -> None:
    op, inputs = make(case, 130, torch.float32, strength=1e4)
    wide = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(op, wide, "reference")
    found = [x.double().cpu() for x in outputs_and_gradients(op, on_gpu(inputs), "chunked")]
    assert all(bool(torch.isfinite(x).all()) for x in found)
    # As on the CPU: cumulative decays of up to 64 * 30 whose low bits are 1e-4; what is forgotten has no gradient.
    assert relative_error(found, expected, floor=1.0) < 1e-3


# Norms of the error over the norm: float32 products are exact to 2e-6 or so; float16 is rounded to 5e-4 and bfloat16 to
# 4e-3 at worst, results and operands a few times one after the other.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
REAL = {
    "no_decay": (2, 4, 128, 128),
    "head_decay": (2, 4, 256, 512),
    "channel_decay": (2, 4, 256, 512),
    "grouped": (2, 16, 512, 64),
    "merged": (1, 2, 64, 128),
    "merged_head_decay": (1, 2, 256, 256),
    "merged_channel_decay": (1, 4, 256, 512),
}
"""B, H, K, V of models: RetNet, GLA 1.3B, Mamba-2 with a grown state, the same merged."""


def norm_errors(found: dict, expected: dict) -> dict[str, float]:
    """Norm of each tensor's error over its norm; NaN counts as infinite."""
    ratios = {name: float((found[name] - x).norm() / x.norm().clamp(min=1e-12)) for name, x in expected.items()}
    return {name: ratio if ratio == ratio else float("inf") for name, ratio in ratios.items()}


def compare(case: str, length: int, dtype: torch.dtype, sizes: tuple, strength: float, seed: int) -> dict[str, float]:
    """Errors of the kernels against float64; decays of real models are weaker than those of the small tests."""
    op, inputs = make(case, length, dtype, seed, strength, sizes)
    inputs = on_gpu(keep_wide(inputs))
    expected = run(op, inputs, "reference" if length < 100 else "chunked", torch.float64)
    return norm_errors(run(op, inputs, "triton", None), expected)


@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("length", [1, 5, 64, 65, 130])
def test_kernels_on_small_heads(case: str, length: int, dtype: torch.dtype) -> None:
    found = compare(case, length, dtype, (2, 4, 5, 7), 1.0, seed=length)
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("length", "strength"), [(1100, 0.1), (333, 1.0)])
def test_kernels_on_real_heads(case: str, length: int, strength: float, dtype: torch.dtype) -> None:
    found = compare(case, length, dtype, REAL[case], strength, seed=length)
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("case", ["head_decay", "channel_decay", "grouped", "merged_channel_decay"])
@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e4])
def test_kernels_under_extreme_decays(case: str, strength: float) -> None:
    op, inputs = make(case, 200, torch.float32, strength=strength, sizes=(2, 4, 64, 64))
    inputs = on_gpu(inputs)
    expected = run(op, inputs, "chunked" if strength < 1 else "reference", torch.float64)
    found = errors(run(op, inputs, "triton", None), expected, floor=1.0)
    # As above: the low bits of cumulative decays; what is forgotten has no gradient.
    assert all(error < (1e-3 if strength > 1 else 1e-4) for error in found.values()), found


@pytest.mark.parametrize("case", ["head_decay", "channel_decay"])
def test_weak_decays_after_a_strong_one_keep_their_bits(case: str) -> None:
    op, inputs = make(case, 130, torch.float32, strength=0.1, sizes=(2, 4, 64, 64))
    inputs[3][:, 3::40] = -1e5
    inputs = on_gpu(inputs)
    found = errors(run(op, inputs, "triton", None), run(op, inputs, "reference", torch.float64), floor=1.0)
    # Beside -1e5 a sum in float32 knows 0.1 to 8e-3; taken as -30, twice a chunk, its low bits are 8e-6.
    assert all(error < 2e-4 for error in found.values()), found


@pytest.mark.parametrize("case", ["head_decay", "channel_decay", "merged_channel_decay"])
def test_kernels_give_the_same_bits_every_time(case: str) -> None:
    op, inputs = make(case, 300, torch.bfloat16, sizes=(2, 4, 64, 128))
    inputs = on_gpu(keep_wide(inputs))
    first = run(op, inputs, "triton", None)
    for _ in range(3):
        again = run(op, inputs, "triton", None)
        assert all(torch.equal(again[name], x) for name, x in first.items())


def test_kernels_are_chosen_and_can_be_captured_in_a_graph() -> None:
    op, inputs = make("channel_decay", 128, torch.bfloat16, sizes=(2, 2, 64, 64))
    q, k, v, log_decay, state = on_gpu(keep_wide(inputs))
    expected, _ = gated_linear_attention(q, k, v, log_decay, initial_state=state, backend="triton")
    chosen, _ = gated_linear_attention(q, k, v, log_decay, initial_state=state)
    assert torch.equal(chosen, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = op(q, k, v, log_decay, initial_state=state, backend="triton")
    graph.replay()
    assert torch.equal(captured, expected)


# The compiler looks at .grad of every tensor it is given, also where that warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_functions_may_call_kernels() -> None:
    op, inputs = make("head_decay", 100, torch.float32, sizes=(1, 2, 16, 16))
    leaves = [x.requires_grad_() for x in on_gpu(inputs)]
    expected, _ = op(*leaves[:-1], initial_state=leaves[-1], backend="triton")

    @torch.compile
    def doubled(*leaves: torch.Tensor) -> torch.Tensor:
        return 2 * op(*leaves[:-1], initial_state=leaves[-1])[0]

    out = doubled(*leaves)
    out.sum().backward()
    assert relative_error([out.detach()], [2 * expected.detach()]) < 1e-6
    assert all(bool(torch.isfinite(x.grad).all()) for x in leaves)
