"""What options do to Mamba-2's decoding step and to descriptions; the numbers are in test_against_transformers.py."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from longrecall.errors import UserError
from longrecall.inference.step import DecodingStep
from longrecall.layers.mixers.mamba2 import Mamba2Step
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.stepping.step import PlainStep, StepSettings, step_of
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_layer import RecurrentLayer
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

GROUPS = MIXERS["mamba2_groups"]
FACTORS = [0.5, 1.25, 0.75, 1.5, 0.25]
VARIANTS: dict[str, dict[str, Any]] = {
    "before_gate": GROUPS | {"gated_norm": "before_gate", "proj_bias": True, "time_step_limit": [0.1, 0.6]},
    "none": GROUPS | {"gated_norm": "none", "part_multipliers": FACTORS, "out_bias": True},
    "factors": GROUPS | {"part_multipliers": FACTORS, "conv_bias": False, "proj_bias": True, "out_bias": False},
}


def model_of(mixer: dict[str, Any]) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": mixer, "mlp_size": 24}, {"mixer": mixer}]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(("name", "rows"), [("before_gate", 1), ("before_gate", 5), ("none", 5), ("factors", 1)])
@torch.no_grad()
def test_fused_steps_equal_forward_passes(name: str, rows: int) -> None:
    """In Triton's interpreter; one row with the products in kernels, five without."""
    pytest.importorskip("triton")
    model, generator = model_of(VARIANTS[name]), torch.Generator().manual_seed(1)
    state = model(torch.randint(0, 40, (rows, 7), generator=generator)).past_key_values
    step = DecodingStep(model, rows, fused=True)
    step.load(state)
    for _ in range(2):
        ids = torch.randint(0, 40, (rows,), generator=generator)
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        # float32 sums in another order, through two layers.
        torch.testing.assert_close(step(), out.logits[:, -1], rtol=1e-4, atol=1e-5)


def test_a_convolution_with_another_activation_keeps_the_plain_step() -> None:
    for activation, kind in (("silu", Mamba2Step), ("gelu", PlainStep)):
        model = model_of(GROUPS | {"conv_activation": activation})
        layer = cast(RecurrentLayer, model.model.layers[0])
        settings = StepSettings(1, 0, True, torch.float32, torch.float32, model.model.embeddings)
        assert type(step_of(layer.mixer_config, layer.get_submodule("mixer"), settings)) is kind


def test_descriptions_without_the_options_stay_as_they_were() -> None:
    written = mixer_config(MIXERS["mamba2"] | {"out_bias": False, "gated_norm": "after_gate"}).to_dict()
    assert written == mixer_config(MIXERS["mamba2"]).to_dict()
    assert not {"gated_norm", "out_bias", "conv_activation", "part_multipliers"} & written.keys()
    assert "input_norms" not in mixer_config(MIXERS["mamba"]).to_dict()
    full = mixer_config(VARIANTS["none"])
    assert mixer_config(full.to_dict()) == full and full.to_dict()["part_multipliers"] == tuple(FACTORS)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (GROUPS | {"gated_norm": "befor_gate"}, 'gated_norm must be one of .*Did you mean "before_gate"'),
        (GROUPS | {"conv_activation": "relu"}, "conv_activation must be one of silu, gelu, gelu_pytorch_tanh"),
        (GROUPS | {"part_multipliers": [1.0, 2.0]}, "part_multipliers must be 5 numbers, for z, x, B, C, dt"),
        (GROUPS | {"part_multipliers": ["a"] * 5}, "must be a list of finite numbers"),
        (MIXERS["mamba"] | {"input_norms": "rms"}, "input_norms must be one of none, plain, weighted"),
        (MIXERS["kda"] | {"decay_floor": 0.5}, "decay_floor must be a number below 0"),
        ({"type": "parallel", "ssm": GROUPS}, 'mixer "parallel" is incomplete: .*attention'),
        (MIXERS["parallel"] | {"ssm": {"type": "mlp", "inner_size": 8}}, 'ssm is "mlp", which mixes no tokens'),
    ],
)
def test_descriptions_that_cannot_be(description: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RecurrentConfig(hidden_size=32, layers=[{"mixer": description}])
