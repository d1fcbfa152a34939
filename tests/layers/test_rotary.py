"""Angles of rotary embeddings: those of transformers' functions, for every way to stretch them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from longrecall.errors import UserError
from longrecall.layers.descriptions.rotary import KINDS, RopeScaling, Rotation
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.rotary import radians_of, turned, turns
from longrecall.models.value_checks import check_mixer_values

PAIRS = 12
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn_all": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 300, "beta_fast": 20.0}
    | {"beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn_ratio": {"rope_type": "yarn", "original_max_position_embeddings": 64, "max_position_embeddings": 1024}
    | {"attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 256},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 40},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 30, "factor": 4.0}
    | {"short_factor": [1.0 + i / 9 for i in range(PAIRS)], "long_factor": [2.0 + i for i in range(PAIRS)]},
    "longrope_ratio": {"rope_type": "longrope", "original_max_position_embeddings": 30}
    | {"max_position_embeddings": 90, "short_factor": [1.0] * PAIRS, "long_factor": [1.5] * PAIRS},
}


def theirs(scaling: dict[str, Any], seq_len: int) -> tuple[torch.Tensor, float]:
    """The frequencies of transformers for three quarters of 32 channels, and the attention factor."""
    most = scaling.get("max_position_embeddings", 2048)
    parameters = {"factor": None, **scaling, "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
    parameters.pop("max_position_embeddings", None)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=most)
    config.rope_parameters = parameters
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None, seq_len=seq_len)
    return found


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_those_of_transformers(name: str) -> None:
    """Token by token: every position is the last one of its pass."""
    scaling = RopeScaling.from_dict(SCALINGS[name])
    rotation = Rotation(24, 5000.0, scaling)
    assert rotation.pairs == PAIRS and RopeScaling.from_dict(scaling.to_dict()) == scaling
    for position in (0, 1, 29, 30, 39, 40, 97):
        expected, factor = theirs(SCALINGS[name], position + 1)
        # float32 frequencies of theirs, times the position.
        angle = position * expected.double()
        cos, sin = turns(rotation, torch.tensor([[position]]), torch.float64)
        torch.testing.assert_close(cos[0, 0, 0], angle.cos() * factor, rtol=0, atol=2e-5)
        torch.testing.assert_close(sin[0, 0, 0], angle.sin() * factor, rtol=0, atol=2e-5)


def test_radians_are_made_once_and_serve_training() -> None:
    rotation = Rotation(24, 5000.0, RopeScaling("linear", factor=2.0))
    with torch.inference_mode():
        first = radians_of(rotation, torch.device("cpu"))
    assert radians_of(rotation, torch.device("cpu")) is first and not first.is_inference()
    plain = radians_of(Rotation(24, 5000.0), torch.device("cpu"))
    torch.testing.assert_close(first * 2, plain, rtol=1e-14, atol=0)


def test_text_is_turned_by_three_equal_rows_as_by_one() -> None:
    """Qwen3.5's positions of pictures: for text time, height and width are the same number."""
    generator = torch.Generator().manual_seed(0)
    config = Qwen3_5TextConfig(head_dim=32, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    config.rope_parameters |= {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    x = torch.randn(2, 9, 2, 32, generator=generator)
    places = torch.stack([torch.arange(9), torch.arange(5, 14)])
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(x, places.expand(3, -1, -1))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    # float32 angles of theirs.
    torch.testing.assert_close(turned(x, turns(Rotation(16, 1000.0), places, x.dtype)), expected, rtol=0, atol=1e-5)


WRONG: list[tuple[Any, str]] = [
    ("yarn", "must be a mapping"),
    ({"factor": 2.0}, "must be a mapping"),
    ({"rope_type": "yern", "factor": 2.0}, 'unknown rope_type "yern"'),
    ({"rope_type": "linear"}, '"linear" needs "factor"'),
    ({"rope_type": "linear", "factor": 0}, '"factor" is 0; it must be a finite number above 0'),
    ({"rope_type": "linear", "factor": math.nan}, '"factor" is nan'),
    ({"rope_type": "linear", "factor": True}, '"factor" is True'),
    ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, '"linear" has no use for "mscale"'),
    ({"rope_type": "linear", "factor": 2.0, "scale": 1.0}, 'no field "scale"'),
    ({"rope_type": "yarn", "original_max_position_embeddings": 64}, 'needs "factor", or "max_position_embeddings"'),
    (SCALINGS["yarn"] | {"truncate": 1}, '"truncate" is 1; it must be true or false'),
    (SCALINGS["yarn"] | {"original_max_position_embeddings": 2.5}, "must be a positive whole number"),
    (SCALINGS["llama3"] | {"high_freq_factor": 1.0}, 'must be above "low_freq_factor"'),
    (SCALINGS["longrope"] | {"long_factor": [1.0, "x"]}, "\"long_factor\" is [1.0, 'x']; it must be a list of numbers"),
    (SCALINGS["longrope"] | {"long_factor": [1.0, 2.0]}, '"long_factor" has 2 numbers; there are 4 pairs'),
]


@pytest.mark.parametrize(("scaling", "message"), WRONG)
def test_what_cannot_be_is_refused_in_one_line(scaling: Any, message: str) -> None:
    description = {"type": "attention", "num_heads": 2, "head_dim": 8, "rope_scaling": scaling}
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        description["rope_scaling"] = {**scaling, "short_factor": [1.0] * 4}
    check_mixer_values(description)
    with pytest.raises(UserError) as caught:
        mixer_config(description)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith('mixer "attention": rope_scaling')


def test_every_kind_is_among_the_cases() -> None:
    assert {case["rope_type"] for case in SCALINGS.values()} == set(KINDS)
    with pytest.raises(UserError, match="make that number even"):
        mixer_config({"type": "attention", "num_heads": 2, "head_dim": 7})
    with pytest.raises(UserError, match="more than 2 channels"):
        mixer_config({"type": "attention", "num_heads": 2, "head_dim": 2, "rope_scaling": SCALINGS["dynamic"]})
