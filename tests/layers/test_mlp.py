"""MLPs beside those of transformers, with the same weights: outputs and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaMLP
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMLP
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextMLP
from transformers.models.recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaMlp

from longrecall.errors import UserError
from longrecall.layers.descriptions import mlp as descriptions
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.mlp import ACTIVATIONS, MLP, SwiGLU

GELU = "gelu_pytorch_tanh"
CASES: dict[str, tuple[type[nn.Module], Any, dict[str, Any]]] = {
    "qwen": (Qwen3NextMLP, partial(Qwen3NextConfig, intermediate_size=40), {}),
    "qwen_gelu": (Qwen3NextMLP, partial(Qwen3NextConfig, intermediate_size=12, hidden_act="gelu"), {}),
    "nemotron": (NemotronHMLP, partial(NemotronHConfig, intermediate_size=40), {}),
    "nemotron_bias": (NemotronHMLP, partial(NemotronHConfig, intermediate_size=24, mlp_bias=True), {}),
    "nemotron_silu": (NemotronHMLP, partial(NemotronHConfig, intermediate_size=8, mlp_hidden_act="silu"), {}),
    "falcon": (FalconH1MLP, partial(FalconH1Config, intermediate_size=40), {}),
    "falcon_multipliers": (
        FalconH1MLP,
        partial(FalconH1Config, intermediate_size=24, mlp_multipliers=[0.75, 1.5], mlp_bias=True),
        {"gate_multiplier": 0.75, "output_multiplier": 1.5},
    ),
    "falcon_relu": (
        FalconH1MLP,
        partial(FalconH1Config, intermediate_size=24, mlp_multipliers=[2.0, 0.25], hidden_act="relu"),
        {"gate_multiplier": 2.0, "output_multiplier": 0.25},
    ),
    "bamba_bias": (
        BambaMLP,
        partial(BambaConfig, intermediate_size=24, mlp_bias=True, mamba_n_heads=4, mamba_d_head=8),
        {},
    ),
    "gemma": (RecurrentGemmaMlp, partial(RecurrentGemmaConfig, intermediate_size=80), {}),
    "granite": (GraniteMoeHybridMLP, partial(GraniteMoeHybridConfig, shared_intermediate_size=24, mamba_n_heads=4), {}),
}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen_gelu": {"activation": "gelu"},
    "nemotron": {"gated": False, "activation": "relu2"},
    "nemotron_bias": {"gated": False, "activation": "relu2", "bias": True},
    "nemotron_silu": {"gated": False},
    "falcon_multipliers": {"bias": True},
    "falcon_relu": {"activation": "relu"},
    "bamba_bias": {"bias": True},
    "gemma": {"activation": "gelu_tanh", "bias": True},
}


def make_theirs(name: str) -> nn.Module:
    """An MLP of transformers in float64, its weights from a normal distribution."""
    kind, config, _ = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    with torch.device("meta"):
        empty = kind(config(hidden_size=16, **({"num_attention_heads": 2} if name == "gemma" else {})))
    theirs = empty.to_empty(device="cpu").double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return theirs


def in_our_names(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if name != "granite":
        return tensors
    gate, up = tensors["input_linear.weight"].chunk(2)
    return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": tensors["output_linear.weight"]}


@pytest.mark.parametrize("name", CASES)
def test_the_mlps_of_transformers(name: str) -> None:
    theirs = make_theirs(name)
    held = in_our_names(name, theirs.state_dict())
    more = FIELDS.get(name, {}) | CASES[name][2]
    config = mixer_config({"type": "mlp", "inner_size": held["up_proj.weight"].shape[0], **more})
    ours = config.build(16).double()
    assert isinstance(ours, SwiGLU) == (not more)
    assert config.positionwise
    assert config.state_shapes() == {}
    ours.load_state_dict(held)
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, 2, 5, 16, dtype=torch.float64, generator=generator)
    found = []
    for mlp in (ours, theirs):
        own = x.clone().requires_grad_()
        y = mlp(own)
        (y * weights).sum().backward()
        gradients = {key: parameter.grad for key, parameter in mlp.named_parameters()}
        found.append([y, own.grad, in_our_names(name if mlp is theirs else "", gradients)])
    # The same products in float64, in the same order but for the multipliers.
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours(x[:, 0]), ours(x)[:, 0], rtol=1e-12, atol=1e-12)


def test_activations_are_those_of_transformers() -> None:
    assert tuple(ACTIVATIONS) == descriptions.ACTIVATIONS
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    for name, activation in ACTIVATIONS.items():
        assert torch.equal(activation(x), ACT2FN[name](x)), name
    for other, name in descriptions.OTHER_NAMES.items():
        assert mixer_config({"type": "mlp", "inner_size": 4, "activation": other}).to_dict() == (
            {"type": "mlp", "inner_size": 4} | ({} if name == "silu" else {"activation": name})
        )


def test_gradients_of_gradients_and_narrow_numbers() -> None:
    config = mixer_config({"type": "mlp", "inner_size": 6, "activation": GELU, "bias": True, "gate_multiplier": 0.5})
    mlp = config.build(4)
    assert isinstance(mlp, MLP)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    narrow = config.build(4).bfloat16()
    narrow.load_state_dict(mlp.state_dict())
    # bfloat16 has 8 bits: each of some 4 roundings is up to 2**-9 of its operand.
    torch.testing.assert_close(narrow(x.bfloat16()).float(), mlp(x), rtol=0.05, atol=0.01)
    assert torch.autograd.gradgradcheck(mlp.double(), x.double().requires_grad_())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inner_size": 0}, "inner_size must be a positive whole number"),
        ({"activation": "gelu_pytorch_tan"}, "activation must be one of .* Did you mean .gelu_pytorch_tanh"),
        ({"gated": False, "gate_multiplier": 2.0}, "gate_multiplier needs a gate"),
    ],
)
def test_bad_descriptions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixer_config({"type": "mlp", "inner_size": 4, **fields})
