"""torch.compile traces how a layer chooses its kernels, and has nothing to warn of there."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import utils

pytest.importorskip("triton")

from longrecall.ops.kernels import launch
from tests.conftest import RECURRENT
from tests.models.test_compile import model_of


@pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1")
# One recurrence by default; the others take seconds each to compile and go the same ways.
@pytest.mark.parametrize(
    "mixer", ["gated_delta_net", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gla_conv", "mamba2", "mamba"))]
)
@torch.no_grad()
def test_kernels_are_chosen_without_a_warning(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that remembers its results is traced without its memory, says torch 2.11 and later, once a process."""
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    monkeypatch.setattr(utils, "warn_once_cache", set())
    torch.compiler.reset()
    model = model_of(RECURRENT[mixer], "cpu")
    ids = torch.randint(32, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.compile(backend="eager")
    # Both sum in float32, traced layers in another order here and there.
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
