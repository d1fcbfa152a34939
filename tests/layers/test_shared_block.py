"""Blocks whose weights several layers share: each parameter once, wherever the model goes.

What they compute is compared with transformers' Zamba2 in tests/models/families/zamba2.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import longrecall
from longrecall.errors import UserError
from longrecall.models.accounting import account
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

MAMBA2 = {"type": "mamba2", "inner_dim": 32, "head_dim": 8, "state_dim": 4}
ATTENTION = {"type": "attention", "num_heads": 2, "head_dim": 16, "input_size": 32}


def layer(**changes: Any) -> dict[str, Any]:
    block = {"type": "shared_block", "attention": ATTENTION, "mixer": MAMBA2, "mlp_size": 12, "adapter_rank": 3}
    return {"blocks": [{"name": "mixer", "module": block | changes, "norm": None}]}


def config(*layers: dict[str, Any]) -> RecurrentConfig:
    return RecurrentConfig(vocab_size=31, hidden_size=16, layers=layers)


def model() -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(config(layer(), {"mixer": MAMBA2, "mlp_size": 0}, layer(weights_of=0)))


def shared(found: RecurrentLM) -> list[Any]:
    return [found.model.layers[index].mixer.weights for index in (0, 2)]


def test_every_weight_is_there_once() -> None:
    found = model()
    shapes = found.config.tensor_shapes()
    stored = {name: tuple(tensor.shape) for name, tensor in found.state_dict().items()}
    assert stored == shapes | {"lm_head.weight": (31, 16)}
    assert not any(name.startswith("model.layers.2.mixer.shared.") for name in shapes)
    assert account(found.config).parameters == sum(parameter.numel() for parameter in found.parameters())


def test_both_layers_use_them_after_a_copy_a_move_and_a_checkpoint(tmp_path: Path) -> None:
    found = model().double()
    save(found, tmp_path / "saved")
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = found(tokens).logits
    expected.sum().backward()
    # Of both layers: the gradient of one alone is another one.
    weight = shared(found)[1].down_proj.weight
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    for other in (copy.deepcopy(found), longrecall.load(tmp_path / "saved"), model().double()):
        assert shared(other)[0] is shared(other)[1]
        assert not {id(parameter) for parameter in other.parameters()} & {id(p) for p in found.parameters()}
        assert other.fingerprint() == found.fingerprint()
        assert torch.equal(other(tokens).logits, expected)
        with torch.no_grad():
            shared(other)[1].down_proj.weight.zero_()
        assert not torch.equal(other(tokens).logits, expected)
        assert shared(other)[0].down_proj.weight.abs().sum() == 0


@pytest.mark.parametrize(
    "layers",
    [
        [layer(weights_of=0)],
        [layer(), layer(weights_of=2), layer()],
        [layer(), layer(weights_of=0), layer(weights_of=1)],
        [layer(mlp_size=13), layer(weights_of=0)],
        [{"mixer": MAMBA2, "mlp_size": 0}, layer(weights_of=0)],
    ],
    ids=["itself", "later", "a_borrower", "other_sizes", "another_kind"],
)
def test_weights_are_those_of_an_earlier_layer_alone(layers: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r'"weights_of" of its "shared_block" is \d\. It must be an earlier layer'):
        config(*layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": ATTENTION | {"input_size": 16}}, "its input_size must be 32, got 16"),
        ({"attention": MAMBA2}, 'attention must be of type "attention"'),
        ({"mixer": {"type": "mlp", "inner_size": 4}}, "must be the description of a token mixer"),
        ({"adapter_rank": 0, "attention_adapters": True}, "need an adapter_rank above 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(layer(**changes)).tensor_shapes()
