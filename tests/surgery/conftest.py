"""Tiny models for surgery, and a way to operate on one in memory through the pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery.expansion import Operation, edit_layer, planned_config

VOCAB, WIDTH = 40, 16

MIXERS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "num_heads": 4, "key_dim": 4, "value_dim": 8, "gate_rank": 4},
    "gla_conv": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 4, "gate_rank": 4, "conv_width": 3}
    | {"output_gate": False},
    "retnet": {"type": "retnet", "num_heads": 2, "key_dim": 8, "value_dim": 8},
    "mamba2": {"type": "mamba2", "inner_dim": 32, "head_dim": 8, "state_dim": 4},
    "mamba2_groups": {"type": "mamba2", "inner_dim": 32, "head_dim": 8, "state_dim": 3, "groups": 2}
    | {"proj_bias": True, "gated_norm": "before_gate", "conv_activation": "gelu"},
    "mamba2_plain": {"type": "mamba2", "inner_dim": 32, "head_dim": 16, "state_dim": 4, "conv_bias": False}
    | {"gated_norm": "none", "out_bias": True, "part_multipliers": [0.5, 1.25, 0.75, 1.5, 2.0]},
    "attention": {"type": "attention", "num_heads": 2, "head_dim": 8},
    "gated_delta_net": {"type": "gated_delta_net", "num_heads": 2, "key_dim": 4, "value_dim": 8},
    "gated_delta_net_shared": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 4}
    | {"value_dim": 4, "conv_width": 0},
    "kda": {"type": "kda", "num_heads": 2, "key_dim": 4, "value_dim": 8, "gate_rank": 3},
    "delta_net": {"type": "delta_net", "num_heads": 2, "key_dim": 4, "value_dim": 8, "output_gate": True},
}


SMALL: dict[str, dict[str, Any]] = {
    "add_retrieval": {"chunk": 5, "top_k": 2, "encoder_dim": 12, "num_heads": 4, "head_dim": 6, "kv_heads": 2},
}
"""Options that make a method fit these models."""


def tiny_config(*kinds: str, mlp_size: int = 0) -> RecurrentConfig:
    layers = [{"mixer": MIXERS[kind], "mlp_size": mlp_size} for kind in kinds]
    return RecurrentConfig(vocab_size=VOCAB, hidden_size=WIDTH, layers=layers, context_length=64)


def build_tiny(*kinds: str, seed: int = 0, mlp_size: int = 0) -> RecurrentLM:
    """A model whose every tensor is random: fresh zeros and ones would hide a wrong slice or a forgotten bias."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RecurrentLM(tiny_config(*kinds, mlp_size=mlp_size))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("A_log", "dt_bias", "norm.weight", "bias", ".D")):
                    parameter += 0.3 * torch.randn_like(parameter)
                else:
                    parameter *= 5.0
    return model.eval()


def operate_on(
    model: RecurrentLM, method: str, layers: tuple[int, ...], init: str, seed: int = 0, **options: object
) -> RecurrentLM:
    """The model after surgery, through the pure functions alone; dtype kept, the input untouched."""
    operation = Operation.check(method, init, SMALL.get(method, {}) | options, seed)
    plans = {layer: operation.plan(layer, model.config.layers[layer]["mixer"]) for layer in layers}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for layer in layers:
        prefix = f"model.layers.{layer}."
        members = {
            name.removeprefix(prefix): tensors.pop(name)
            for name in list(tensors)
            if name.startswith((f"{prefix}mixer.", f"{prefix}mixer_norm."))
        }
        edited = edit_layer(layer, model.config.layers[layer]["mixer"], members, operation)
        tensors.update({prefix + name: tensor for name, tensor in edited.items()})
    result = RecurrentLM(planned_config(model.config, plans)).to(model.dtype).eval()
    missing, unexpected = result.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    result.tie_weights()
    return result


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def build() -> Callable[..., RecurrentLM]:
    return build_tiny


@pytest.fixture
def operate() -> Callable[..., RecurrentLM]:
    return operate_on


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 37), generator=torch.Generator().manual_seed(1))
