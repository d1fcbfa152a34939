"""Products in bfloat16: only where they are asked for, as exact as bfloat16 is, with sums and states in float32."""

from __future__ import annotations

import pytest
import torch

from longrecall.ops import gated_linear_attention, products
from tests.ops.test_recurrences import make, outputs_and_gradients

# The ops whose chunked products may be bfloat16.
CASES = ["no_decay", "head_decay", "grouped"]
OTHERS = [
    "delta",
    "gated_delta",
    "channel_decay",
    "channel_delta",
    "generalised_delta",
    "merged",
    "merged_channel_decay",
]
SIZES = (2, 4, 32, 24)
ROUNDING = 2.0**-9


@pytest.fixture
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with instructions for it; torch multiplies bfloat16 on every CPU, elsewhere slowly."""
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", True)


@pytest.mark.usefixtures("fast_bfloat16")
@pytest.mark.parametrize("length", [40, 130, 600])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_within_a_few_roundings(case: str, length: int) -> None:
    op, inputs = make(case, length, torch.bfloat16, sizes=SIZES)
    inputs[-1] = inputs[-1].float()
    if inputs[3] is not None:
        inputs[3] = inputs[3].float()
    wide = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(op, wide, "reference")
    found = outputs_and_gradients(op, inputs, "chunked")
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        # Six products follow one another at most, each with two rounded operands and a rounded result; the roundings
        # of different entries are independent, so that a norm shows about one for each product, and never twelve.
        error = float((a.double() - b).norm() / b.norm())
        assert error < 12 * ROUNDING, f"{index}: {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_the_machine_decides(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, inputs = make(case, 130, torch.bfloat16, sizes=SIZES)
    finals = []
    for able in (False, True):
        monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", able)
        finals.append(op(*inputs[:-1], initial_state=inputs[-1], backend="chunked")[1])
    difference = float((finals[1] - finals[0]).norm() / finals[0].norm())
    # Some rounding must be seen, or the products are not what they are said to be.
    assert ROUNDING / 10 < difference < 12 * ROUNDING
    assert finals[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in (torch.float32, torch.float16, torch.float64)]
    + [(case, torch.bfloat16) for case in OTHERS],
)
def test_everything_else_stays_bit_for_bit(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    op, inputs = make(case, 130, dtype, sizes=SIZES)
    results = []
    for able in (False, True):
        monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", able)
        results.append(outputs_and_gradients(op, inputs, "chunked"))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("fast_bfloat16")
def test_the_state_adds_up_in_float32() -> None:
    # Each chunk of 64 adds 64.5, which bfloat16 holds; what 65 chunks add up to, 4192.5, it does not.
    length = 64 * 65
    ones = torch.ones(1, length, 1, 16, dtype=torch.bfloat16)
    values = torch.full((1, length, 1, 16), 1 + 2.0**-7, dtype=torch.bfloat16)
    _, final = gated_linear_attention(ones, ones, values, None, backend="chunked")
    assert torch.equal(final, torch.full_like(final, 4192.5))


def test_decays_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # A decay of 0.999 a token: bfloat16 would hold 1 - 2**-10 as 1, and forget nothing in 130 tokens.
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", True)
    op, (q, k, v, decay, state) = make("head_decay", 130, torch.bfloat16, sizes=SIZES)
    decay, state = torch.full_like(decay, -1e-3, dtype=torch.float32), state.float()
    _, final = op(q, k, torch.zeros_like(v), decay, initial_state=state, backend="chunked")
    # Nothing is written, so that no product matters: float32 rounding of one exponential.
    torch.testing.assert_close(final, state * torch.tensor(-0.13, dtype=torch.float64).exp().float(), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("fast_bfloat16")
def test_only_bfloat16_inputs_on_a_cpu_count() -> None:
    def chosen(*dtypes: torch.dtype, accumulation: torch.dtype = torch.float32, device: str = "cpu") -> torch.dtype:
        q, k, v = (torch.empty(1, dtype=dtype, device=device) for dtype in (dtypes * 3)[:3])
        return products.product_dtype(q, k, v, accumulation)

    # As Mamba-2 calls, whose values have met a float32 time step, and the other way round.
    assert chosen(torch.bfloat16, torch.bfloat16, torch.float32) == torch.bfloat16
    assert chosen(torch.float32, torch.float32, torch.bfloat16) == torch.bfloat16
    assert chosen(torch.bfloat16) == torch.bfloat16
    assert chosen(torch.float32) == chosen(torch.float16) == torch.float32
    assert chosen(torch.bfloat16, accumulation=torch.float64) == torch.float64
    assert chosen(torch.bfloat16, device="meta") == torch.float32


@pytest.mark.parametrize(
    ("described", "expected"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True, "avx512_bf16": False}, True), ({"avx512_f": True}, False)],
)
def test_the_instructions_that_count(
    described: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: described, raising=False)
    assert products._multiplies_bfloat16() is expected


def test_a_torch_that_cannot_tell_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert products._multiplies_bfloat16() is False
