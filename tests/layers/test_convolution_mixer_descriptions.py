"""How BaseConv, Hyena, H3 and Hymba are described, and what their descriptions may not say."""

from __future__ import annotations

from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.accounting import describe_sizes
from tests.layers.test_convolution_mixers import ATTENTION, EVERY, HYMBA, PLAIN


def test_sizes_in_one_line() -> None:
    mixer = mixer_config(HYMBA | {"third": PLAIN["base_conv_implicit"]}).to_dict()
    assert describe_sizes(mixer, 8) == (
        "attention num_heads=4 kv_heads=2 head_dim=4 window=5 meta_tokens=3 + h3 num_heads=2 head_dim=3 state_dim=4 "
        "shift_dim=5 + base_conv channels=6 implicit max_length=11 filter_width=16 mlp=8"
    )


@pytest.mark.parametrize("name", EVERY)
def test_descriptions_round_trip(name: str) -> None:
    config = mixer_config(EVERY[name])
    assert mixer_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"type": "base_conv", "channels": 6, "kernel": 4, "implicit": True}, 'drop "kernel" or "implicit"'),
        ({"type": "base_conv", "channels": 6, "kernel": 0}, "kernel must be a positive whole number"),
        ({"type": "h3", "num_heads": 2, "head_dim": 1, "state_dim": 5}, "state_dim must be even"),
        ({"type": "hyena", "inner_dim": 5, "max_length": 0}, "max_length must be a positive whole number"),
        ({"type": "hymba", "attention": ATTENTION}, 'mixer "hymba" is incomplete'),
        (HYMBA | {"ssm": {"type": "h4"}}, 'unknown mixer type "h4"'),
        (ATTENTION | {"meta_tokens": -1}, "meta_tokens must be a whole number >= 0"),
    ],
)
def test_bad_descriptions_are_named(description: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixer_config(description)


def test_base_conv_must_have_the_width_of_its_model() -> None:
    with pytest.raises(UserError, match=r"channels \(6\) must be the model's hidden_size \(8\)"):
        mixer_config(PLAIN["base_conv"]).build(8)


def test_attention_without_meta_tokens_is_described_as_before() -> None:
    assert "meta_tokens" not in mixer_config({"type": "attention", "num_heads": 2, "head_dim": 4}).to_dict()
