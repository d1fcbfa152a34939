"""Descriptions say what the layers that they mean hold: every tensor's name and shape, in order, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from longrecall.errors import UserError
from longrecall.layers import expansion as modules
from longrecall.layers.descriptions import expansion as descriptions
from longrecall.layers.mixers.registry import MIXERS as TYPES
from longrecall.layers.mixers.registry import mixer_config
from tests.conftest import MIXERS

WIDTH = 32
HEADS = {"num_heads": 2, "key_dim": 6, "value_dim": 10}
EXPANSIONS: list[dict[str, Any]] = [
    {"kind": "headwise", "factor": 3},
    {"kind": "headwise", "factor": 3, "subheads": False},
    {"kind": "headwise", "factor": 3, "grafted": True},
    {"kind": "low_rank", "factor": 3},
    {"kind": "low_rank", "factor": 3, "rank": 5, "subheads": False},
    {"kind": "dpfp", "factor": 4},
    {"kind": "lfm", "factor": 3},
    {"kind": "naive", "factor": 3},
    {"kind": "heads", "factor": 3},
]
SHARED_BLOCK: dict[str, Any] = {
    "type": "shared_block",
    "attention": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 16, "input_size": 2 * WIDTH},
    "mixer": MIXERS["mamba2"],
    "mlp_size": 24,
    "bias": True,
    "adapter_rank": 3,
}
MORE: dict[str, dict[str, Any]] = {
    "retnet_conv": {"type": "retnet", **HEADS, "conv_width": 3, "output_gate": False},
    "delta_net_gate": {"type": "delta_net", **HEADS, "conv_width": 0, "output_gate": True},
    "gated_delta_net_plain": {"type": "gated_delta_net", **HEADS, "conv_width": 0, "output_gate": False},
    "mamba2_biases": MIXERS["mamba2"] | {"conv_bias": False, "proj_bias": True},
    "mamba_biases": MIXERS["mamba"] | {"conv_bias": False, "proj_bias": True},
    "mamba2_no_norm": MIXERS["mamba2"] | {"gated_norm": "none", "out_bias": True},
    "mamba_weighted": MIXERS["mamba"] | {"input_norms": "weighted"},
    "attention_bias": MIXERS["attention"] | {"qkv_bias": True},
    "mlp": {"type": "mlp", "inner_size": 24},
    "mlp_no_gate": {"type": "mlp", "inner_size": 24, "gated": False, "activation": "relu2", "bias": True},
    "mlp_biases": {"type": "mlp", "inner_size": 24, "activation": "gelu", "bias": True, "output_multiplier": 0.5},
    "identity": {"type": "identity"},
    "moe": {"type": "moe", "num_experts": 4, "top_k": 2, "inner_size": 8},
    "moe_shared": {
        "type": "moe",
        "num_experts": 4,
        "top_k": 2,
        "inner_size": 8,
        "shared_size": 24,
        "shared_gate": True,
    },
    "moe_latent": {"type": "moe", "num_experts": 4, "top_k": 2, "inner_size": 8, "router": "sigmoid", "gated": False}
    | {"correction_bias": True, "latent_size": 12, "shared_size": 24, "bias": True},
    "hymba_third": MIXERS["hymba"] | {"third": MIXERS["gla"]},
    **{f"{one}_channel": {"type": f"{one}_channel", "input_dim": WIDTH, "inner_dim": 40} for one in ("rwkv4", "rwkv6")},
    "rwkv7_channel": {"type": "rwkv7_channel", "input_dim": WIDTH, "inner_dim": 40},
    "shared_block": SHARED_BLOCK,
    "shared_block_lent": SHARED_BLOCK | {"weights_of": 0, "attention_adapters": True},
    "retrieval_hard": MIXERS["retrieval"] | {"selector": "hard", "blend": "learned"},
    "retrieval_fixed": MIXERS["retrieval"] | {"blend": "fixed", "base": MIXERS["handover"]},
}
for kind in ("gla", "delta_net", "gated_delta_net", "kda"):
    values = {"value_heads": 4} if kind == "gated_delta_net" else {}
    for number, expansion in enumerate(EXPANSIONS):
        MORE[f"{kind}_{number}"] = {"type": kind, **HEADS, **values, "conv_width": 4, "expansion": expansion}
CASES = MIXERS | MORE


def test_every_type_is_among_the_cases() -> None:
    assert {case["type"] for case in CASES.values()} == TYPES.keys()
    assert set(descriptions.KINDS) == modules.EXPANDERS.keys()
    assert set(descriptions.ACTIVATIONS) == modules.ACTIVATIONS.keys()
    for kind, expander in modules.EXPANDERS.items():
        assert (kind in descriptions.WITHOUT_ACTIVATION) == (expander is None or not expander.has_activation)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_has_the_tensors_of_its_description(name: str) -> None:
    config = mixer_config(CASES[name])
    with torch.device("meta"):
        layer = config.build(WIDTH)
    held = [(name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items()]
    assert list(config.tensor_shapes(WIDTH).items()) == held


@pytest.mark.parametrize("name", ["rwkv5", "rwkv7", "base_conv"])
def test_a_layer_of_another_width_is_refused_by_both(name: str) -> None:
    config = mixer_config(MIXERS[name])
    for of_width in (config.tensor_shapes, config.build):
        with pytest.raises(UserError, match=r"must be the .*hidden_size.*\(24\)"):
            of_width(24)


def test_descriptions_need_no_torch() -> None:
    code = "import sys, longrecall.layers.mixers.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
