"""torch.compile of the layers computes what they compute: outputs, states and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from tests.conftest import RECURRENT

pytestmark = [
    # The compiler looks at .grad of every tensor it is given, also where that warns.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # The compiler's advice to users of such a GPU; the comparison wants full float32.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),
]

KINDS = ("gla_conv", "gated_delta_net", "kda", "mamba2", "mamba")
"""One for each recurrence, all with convolutions: compiling takes seconds."""

TWINS = ("gla_conv", "kda")
"""Those whose ops another one has too (Mamba-2, Gated DeltaNet), with other decays: compiled by `-m slow` alone."""


def model_of(mixer: dict[str, Any], device: str) -> RecurrentLM:
    torch.manual_seed(0)
    layer = {"mixer": mixer, "mlp_size": 24}
    return RecurrentLM(RecurrentConfig(vocab_size=32, hidden_size=16, layers=[layer])).to(device)


def outcome(model: RecurrentLM, ids: Tensor, state: RecurrentState) -> dict[str, Tensor]:
    """The loss, the final state and the gradient of every parameter, reading from `state`."""
    out = model(ids, labels=ids, past_key_values=state)
    final = {f"{i}.{n}": t for i, layer in enumerate(out.past_key_values.layers) for n, t in layer.items()}
    # The state counts too: its gradient reaches what the loss alone does not.
    (out.loss + sum(t.square().sum() for t in final.values() if t.requires_grad)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss, **final, **gradients}


def check(mixer: dict[str, Any], device: str, backend: str) -> None:
    torch.compiler.reset()
    eager = model_of(mixer, device)
    compiled = copy.deepcopy(eager)
    for layer in compiled.model.layers:
        layer.compile(backend=backend)
    ids = torch.randint(32, (2, 50), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        state = eager(ids[:, :9]).past_key_values
    expected, found = outcome(eager, ids[:, 9:], state), outcome(compiled, ids[:, 9:], state)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        # Both sum in float32, the compiler in another order: 1e-4 of the largest entry, as between eager backends.
        error = (tensor - found[name]).abs().max() / tensor.abs().max().clamp(min=1e-6)
        assert error < 1e-4, f"{name}: {float(error):.2g}"


@pytest.mark.parametrize("mixer", [pytest.param(m, marks=[pytest.mark.slow] if m in TWINS else []) for m in KINDS])
def test_compiled_layers_have_the_same_gradients(mixer: str) -> None:
    check(RECURRENT[mixer], "cpu", "aot_eager")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixer", KINDS)
def test_compiled_layers_have_the_same_gradients_on_a_gpu(mixer: str) -> None:
    check(RECURRENT[mixer], "cuda", "inductor")
