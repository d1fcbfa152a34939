"""How configs say by which angles heads are turned: as transformers reads the same file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.rotary import turns
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.rope import read_rope, rope_parameters

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "older": {"rope_theta": 500.0},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "pictures": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "mrope_section": [2, 1, 1]}},
    "older_linear": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "share": {"rope_parameters": YARN | {"rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    "older_share": {
        "rope_theta": 50.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": YARN | {"attention_factor": None},
    },
    "yarn_without_a_length": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 50.0}},
    "yarn_by_lengths": {"rope_parameters": YARN | {"factor": None, "rope_theta": 50.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}},
    "longrope": {"rope_scaling": LONG | {"factor": 2.0}, "original_max_position_embeddings": 20, "rope_theta": 90.0},
    "of_no_use": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 9.0, "rope_theta": 50.0}},
}


def copied(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers writes into the mappings that it is given."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in raw.items()}


@pytest.mark.parametrize("name", FILES)
def test_angles_are_those_that_transformers_reads(name: str) -> None:
    raw = FILES[name] | {"max_position_embeddings": 64}
    width = 16 if "share" in name else 8
    config = LlamaConfig(hidden_size=2 * width, num_attention_heads=2, **copied(raw))
    if "original_max_position_embeddings" in raw:
        config.rope_parameters["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    theirs = LlamaRotaryEmbedding(config)
    fields = Fields(copied(raw), "config.json")
    found = read_rope(fields)
    fields.finish()
    ours = mixer_config({"type": "attention", "num_heads": 2, "head_dim": width} | found)
    for position in (0, 5, 40):
        cos, sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        by = turns(ours.rotation, torch.tensor([[position]]), torch.float64)  # type: ignore[attr-defined]
        for one, other in ((by.cos, cos), (by.sin, sin)):
            # float32 angles of theirs.
            torch.testing.assert_close(one[0, 0, 0], other[0, 0, : one.shape[-1]].double(), rtol=0, atol=1e-5)
    again = Fields({"rope_parameters": rope_parameters(ours), "max_position_embeddings": 64}, "config.json")  # type: ignore
    assert read_rope(again) == found


def test_no_positions_and_shares_that_nobody_looks_at() -> None:
    none = Fields({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "config.json")
    assert read_rope(none) == {"rotary_share": 0.0}
    half = {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}}
    assert read_rope(Fields(half, "config.json"))["rotary_share"] == 0.5
    assert read_rope(Fields(half, "config.json"), plain_share=False)["rotary_share"] == 1.0
    assert read_rope(Fields({}, "config.json"), theta=7.0, share=0.25)["rotary_share"] == 0.25


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_parameters": [1]}, "it must be a mapping"),
        (
            {"rope_parameters": {"rope_type": "axial"}},
            "\"rope_type\" is 'axial'; longrecall reads only default, linear",
        ),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "longrecall reads only default, linear"),
        (
            {"rope_parameters": {"rope_theta": -1}},
            '"rope_parameters": "rope_theta" is -1; it must be a finite number > 0',
        ),
        ({"rope_theta": "x"}, "\"rope_theta\" is 'x'"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "it must be at most 1"),
        ({"rope_parameters": {"theta": 5.0}}, 'does not know the key "theta"'),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            '"llama3" needs "original_max_position_embeddings"',
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, '"dynamic" needs "max_position_embeddings"'),
    ],
)
def test_what_cannot_be_is_one_line(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rope(Fields(raw, "config.json"))
    assert str(caught.value).startswith("config.json: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)
