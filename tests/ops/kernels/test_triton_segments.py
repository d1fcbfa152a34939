"""Walks in segments side by side, in Triton's CPU interpreter: against float64 and against the walk in one piece."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from tests.ops.delta_rule.test_triton_delta import TOLERANCE, errors, interpreted, make
from tests.ops.linear_attention.test_triton_linear import check
from tests.ops.test_recurrences import make as make_linear

launch = pytest.importorskip("longrecall.ops.kernels.launch")
delta_split = pytest.importorskip("longrecall.ops.delta_rule.triton.segments")
linear_attention = pytest.importorskip("longrecall.ops.linear_attention.triton.chunked")


def shape(B: int, H: int, E: int, R: int, K: int, V: int) -> dict[str, int]:
    return {"B": B, "H": H, "E": E, "R": R, "K": K, "V": V}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut every walk into so many segments from now on, at most one for each chunk."""

    def into(count: int) -> None:
        def segments(programs: int, chunks: int, processors: int, *, products: bool = False) -> int:
            return -(-chunks // -(-chunks // min(count, chunks)))

        monkeypatch.setattr(launch, "segments", segments)

    return into


@given(
    programs=st.integers(1, 500), chunks=st.integers(1, 2000), processors=st.integers(1, 200), products=st.booleans()
)
def test_segments_fill_the_processors_and_none_is_empty(
    programs: int, chunks: int, processors: int, products: bool
) -> None:
    count = launch.segments(programs, chunks, processors, products=products)
    per = -(-chunks // count)
    assert (count - 1) * per < chunks <= count * per
    assert count == 1 or per >= launch.LEAST_CHUNKS
    assert count == 1 or programs * count <= launch.PROGRAMS * processors
    if programs * 2 <= launch.PROGRAMS * processors and chunks >= 2 * launch.LEAST_CHUNKS:
        assert count > 1
    assert not products or count * count <= chunks


@pytest.mark.parametrize(
    ("rows", "length", "best"),
    [(1, 4096, (8,)), (2, 4096, (4, 8)), (4, 4096, (4,)), (1, 1000, (4,)), (2, 1000, (4,)), (4, 1000, (2, 4)),
     (1, 65536, (16,)), (2, 65536, (8,)), (4, 65536, (4, 8))],
)  # fmt: skip
def test_segments_of_the_delta_rule_are_those_measured_best(rows: int, length: int, best: tuple[int, ...]) -> None:
    """8 heads of 128 on an H200, 16 programs a row; both counts where they were within 5 percent."""
    assert launch.segments(16 * rows, -(-length // 64), 132, products=True) in best


def delta_errors(inputs: list[Tensor], floor: float = 1e-12) -> list[float]:
    """Relative errors of outputs and final state against float64."""
    wide = [x.double() for x in inputs]
    found, expected = (
        subhead_delta_rule(*x[:5], weights=x[5], initial_state=x[6], backend=backend)
        for x, backend in ((inputs, "triton"), (wide, "chunked"))
    )
    pairs = zip(found, expected, strict=True)
    return [float((a - b).norm() / b.norm().clamp(min=floor)) for a, b in pairs]


@interpreted
@pytest.mark.parametrize(
    ("sizes", "length", "count", "dtype"),
    [
        (shape(1, 1, 2, 2, 16, 32), 190, 3, torch.float32),
        (shape(2, 1, 1, 1, 32, 16), 200, 4, torch.bfloat16),
        (shape(1, 1, 3, 1, 16, 16), 100, 2, torch.float16),
        (shape(1, 1, 1, 2, 7, 17), 193, 4, torch.float32),
    ],
    ids=["float32", "bfloat16", "float16", "filled_up"],
)
def test_the_delta_rule_in_segments_equals_float64(
    sizes: dict[str, int], length: int, count: int, dtype: torch.dtype, cut: Callable[[int], None]
) -> None:
    cut(count)
    found = delta_errors(make(sizes, length, dtype))
    assert all(error < TOLERANCE[dtype] for error in found), found


@interpreted
def test_gradients_of_the_delta_rule_in_segments(cut: Callable[[int], None]) -> None:
    cut(3)
    found = errors(make(shape(1, 1, 1, 1, 16, 16), 150, torch.float32))
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


@interpreted
@pytest.mark.parametrize("strength", [1e-4, 1e4])
def test_extreme_decays_of_the_delta_rule(strength: float, cut: Callable[[int], None]) -> None:
    cut(3)
    found = delta_errors(make(shape(1, 1, 1, 1, 16, 16), 180, torch.float32, strength), floor=1.0)
    # As for the walk in one piece: cumulative decays of up to 64 * 30 have low bits of 1e-4 in float32.
    assert all(error < (1e-3 if strength > 1 else TOLERANCE[torch.float32]) for error in found), found


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_segments_lose_no_more_than_the_walk_in_one_piece(dtype: torch.dtype, cut: Callable[[int], None]) -> None:
    # Hardly any decay, so that what the first segment leaves is read in the last.
    inputs = make(shape(1, 1, 1, 1, 16, 16), 250, dtype, 1e-3)
    cut(4)
    split = delta_errors(inputs)
    cut(1)
    for one, other in zip(split, delta_errors(inputs), strict=True):
        # The same roundings in another order: up to a half more is chance.
        assert one < 1.5 * other


@interpreted
def test_joining_segments_hardly_rounds() -> None:
    n, K, V = 6, 32, 16
    g = torch.Generator().manual_seed(3)
    ends, maps, state = (torch.randn(3, count, K, width, generator=g) for count, width in ((5, V), (4, K), (1, V)))
    maps *= K**-0.5
    found = state.new_empty(3, n, K, V)
    delta_split.starts_kernel[(1, 3)](ends, maps, state, found, n, K=K, V=V, BV=V, MODE="bf16 wide")
    expected = [state[:, 0].double(), ends[:, 0].double()]
    for s in range(1, n - 1):
        expected.append(maps[:, s - 1].double() @ expected[-1] + ends[:, s].double())
    right = torch.stack(expected, 1)
    # Four products one after the other, of operands held to 2^-15 where the interpreter cuts off rather than rounds;
    # without the second bfloat16 of an operand 2^-9 is left.
    assert float((found - right).norm() / right.norm()) < 1e-4


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "CHUNK", 16)


def check_outputs(op: Callable, inputs: list, tolerance: float, floor: float = 1e-12) -> None:
    """Outputs and final state against float64, relative to the largest entry."""
    wide = [None if x is None else x.double() for x in inputs]
    found = op(*inputs[:-1], initial_state=inputs[-1], backend="triton")
    expected = op(*wide[:-1], initial_state=wide[-1], backend="reference")
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) < tolerance * max(float(b.abs().max()), floor)


@interpreted
@pytest.mark.parametrize("case", ["no_decay", "head_decay", "channel_decay", "grouped", "merged_channel_decay"])
def test_linear_attention_in_segments(case: str, cut: Callable[[int], None], short_chunks: None) -> None:
    cut(3)
    op, inputs = make_linear(case, 70, torch.float32, sizes=(1, 4, 5, 7) if case == "grouped" else (2, 1, 5, 7))
    # float32 sums of at most a few hundred terms.
    check_outputs(op, inputs, 5e-6)


@interpreted
def test_gradients_of_linear_attention_in_segments(cut: Callable[[int], None], short_chunks: None) -> None:
    cut(2)
    check(*make_linear("head_decay", 40, torch.float32, sizes=(1, 1, 5, 7)), 5e-6)


@interpreted
@pytest.mark.parametrize("strength", [1e-4, 1e4])
def test_extreme_decays_of_linear_attention(strength: float, cut: Callable[[int], None], short_chunks: None) -> None:
    cut(2)
    op, inputs = make_linear("channel_decay", 40, torch.float32, strength=strength, sizes=(1, 1, 5, 7))
    # As in test_triton_linear.py.
    check_outputs(op, inputs, 1e-3 if strength > 1 else 5e-6, floor=1.0)


@interpreted
def test_segments_begin_anew_in_every_buffer_of_states(
    cut: Callable[[int], None], short_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two blocks of keys and of values; four chunks to a buffer, the second of which begins within the sequence.
    op, inputs = make_linear("head_decay", 90, torch.float32, sizes=(1, 1, 70, 66))
    monkeypatch.setattr(linear_attention, "SEGMENT_BYTES", 4 * inputs[-1].numel() * 4)
    cut(2)
    check_outputs(op, inputs, 5e-6)
