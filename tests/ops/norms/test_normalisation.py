"""Norms, gated norms and the SwiGLU product against their formulas in float64, and who is chosen to compute them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrecall.layers.norm import RMSNorm, operand_dtype
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.norms import op as normalisation
from tests.conftest import RECURRENT


def rms(x: Tensor, eps: float, groups: int) -> Tensor:
    """Written out: every number over the root of its group's mean square."""
    parts = x.unflatten(-1, (groups, -1))
    return (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), width=st.integers(1, 9), groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_definitions_are_the_formulas(rows: int, width: int, groups: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, update, gate = (torch.randn(2, rows, groups * width, generator=g, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(groups * width, generator=g, dtype=torch.float64)
    silu = gate * gate.sigmoid()
    stream, normed = normalisation.add_rms_norm(x, update, weight, 1e-5, groups=groups)
    # float64 on both sides: only the order of a few sums differs.
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(stream, x + update, **close)
    torch.testing.assert_close(normed, rms(x + update, 1e-5, groups) * weight, **close)
    torch.testing.assert_close(
        normalisation.rms_norm(x, weight, 1e-5, groups=groups), rms(x, 1e-5, groups) * weight, **close
    )
    expected: dict[Any, Tensor] = {
        "silu": rms(x, 1e-5, groups) * weight * silu,
        "sigmoid": rms(x, 1e-5, groups) * weight * gate.sigmoid(),
        "silu_before": rms(x * silu, 1e-5, groups) * weight,
    }
    for kind, right in expected.items():
        found = normalisation.gated_rms_norm(x, gate, weight, 1e-5, kind=kind, groups=groups)
        torch.testing.assert_close(found, right, **close)
    torch.testing.assert_close(normalisation.silu_product(gate, x), silu * x, **close)
    matrix = torch.randn(3, groups * width, generator=g, dtype=torch.float64)
    torch.testing.assert_close(normalisation.gated_projection(gate, x, matrix), (silu * x) @ matrix.T, **close)


def test_norms_are_computed_in_float32_and_rounded_once() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 33, generator=g).bfloat16(), torch.randn(33, generator=g).bfloat16()
    expected = (rms(x.float(), 1e-5, 1) * weight.float()).bfloat16()
    found = normalisation.rms_norm(x, weight, 1e-5)
    # The last bit of float32 may decide how one in thousands is rounded.
    assert float((found != expected).float().mean()) < 0.01
    assert normalisation.rms_norm(x, weight, 1e-5, dtype=torch.float32).dtype == torch.float32


def test_who_computes_is_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    x, weight = torch.randn(20, 8), torch.ones(8)
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight}
    assert normalisation.RMS_NORM.why_plain(tensors) == "the tensors are not on a GPU"
    monkeypatch.setenv("LONGRECALL_BACKEND", "chunked")
    assert normalisation.RMS_NORM.why_plain(tensors) == "LONGRECALL_BACKEND is chunked"
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert normalisation.RMS_NORM.why_plain({"x": x[:15], "weight": weight}) == (
        "fewer than 16 rows are left to plain torch"
    )
    with pytest.raises(ValueError, match='unknown backend "chunked" of rms_norm'):
        normalisation.rms_norm(x, weight, 1e-5, backend="chunked")
    with pytest.raises(ValueError, match="cannot serve this call of rms_norm: "):
        normalisation.rms_norm(x.double(), weight.double(), 1e-5, backend="triton")


def test_a_wide_stream_becomes_the_models_dtype() -> None:
    norm = RMSNorm(8).bfloat16()
    stream, normed = norm(torch.randn(3, 8), torch.bfloat16, update=torch.randn(3, 8).bfloat16(), of_stream=True)
    assert (stream.dtype, normed.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("mixer", ["gla_conv", "gated_delta_net", "kda", "mamba2", "mom", "hgrn2"])
def test_under_autocast_norms_round_as_the_projections_behind_them_would(
    mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = {"mixer": RECURRENT[mixer], "mlp_size": 24}
    model = RecurrentLM(RecurrentConfig(vocab_size=32, hidden_size=16, layers=[layer, layer]))
    ids = torch.randint(32, (2, 20))

    def logits() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(ids).logits
        return found

    found = logits()
    for module in sys.modules.values():
        if hasattr(module, "operand_dtype") and module.__name__.startswith("longrecall"):
            monkeypatch.setattr(module, "operand_dtype", lambda x, dtype=None: dtype or x.dtype)
    assert torch.equal(found, logits())


def test_a_float64_model_stays_so_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert operand_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
        assert operand_dtype(torch.zeros(1)) == torch.bfloat16
    assert operand_dtype(torch.zeros(1)) == torch.float32
