"""A new mixer with a decoding step of its own is one file and one registry line: tried with one that nobody ships."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.inference.eligibility import why_no_step
from longrecall.inference.step import DecodingStep
from longrecall.layers.mixers.registry import MIXERS, mixer_config
from longrecall.layers.stepping.step import PlainStep
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

SOURCE = '''
"""A running mean of a projection, with a step of its own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from longrecall.layers.mixers.base import MixerConfig
from longrecall.layers.stepping.step import MixerStep


@dataclass(frozen=True)
class RunningSumConfig(MixerConfig):
    """Sizes of the layer."""

    type: ClassVar[str] = "running_sum"
    width: int = 8

    def state_shapes(self):
        return {"recurrent": (1, 1, self.width)}

    def build(self, hidden_size):
        return RunningSum(self, hidden_size)


class RunningSum(nn.Module):
    def __init__(self, config, hidden_size):
        super().__init__()
        self.config = config
        self.down_proj = nn.Linear(hidden_size, config.width, bias=False)
        self.up_proj = nn.Linear(config.width, hidden_size, bias=False)

    def decoding_step(self, config, settings):
        return RunningSumStep(config, self, settings)

    def forward(self, x, state, *, mask, position):
        y = self.down_proj(x) if mask is None else self.down_proj(x) * mask[..., None]
        before = 0.0 if state is None else state["recurrent"][:, 0]
        total = before + y.float().cumsum(1)
        return self.up_proj(total.to(x.dtype)), {"recurrent": total[:, -1:, None].transpose(1, 2)}


class RunningSumStep(MixerStep):
    ran = 0

    def __call__(self, stream, norm, buffers, position):
        type(self).ran += 1
        (y,) = stream.project(norm, [self.mixer.down_proj.weight])
        buffers["recurrent"].add_(y.float()[:, None, None])
        stream.add_product(buffers["recurrent"][:, 0, 0].to(y.dtype), self.mixer.up_proj.weight)
'''


@pytest.fixture
def running_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with its line in the registry."""
    package = tmp_path / "somebodys_mixers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "running_sum.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("somebodys_mixers.running_sum")
    monkeypatch.setitem(MIXERS, module.RunningSumConfig.type, module.RunningSumConfig)
    monkeypatch.setattr(sys, "argv", ["longrecall"])
    return module


@torch.no_grad()
def test_it_decodes_by_its_own_step(running_sum: ModuleType) -> None:
    torch.manual_seed(0)
    layers = [{"mixer": {"type": "running_sum"}}, {"mixer": {"type": "retrieval", "base": {"type": "running_sum"}}}]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()
    assert why_no_step(model) is None
    state = model(torch.arange(6)[None]).past_key_values
    step = DecodingStep(model, 1, room=9)
    step.load(state)
    for token in (3, 8):
        out = model(torch.tensor([[token]]), past_key_values=state)
        state = out.past_key_values
        step.ids.fill_(token)
        # float32 sums in another order, through two layers.
        torch.testing.assert_close(step(), out.logits[:, -1], rtol=1e-4, atol=1e-5)
    # In the layer, and inside of the retrieval layer.
    assert running_sum.RunningSumStep.ran == 4
    assert not isinstance(step.steps[0].blocks[0].step, PlainStep)


def test_it_is_read_from_a_description_and_shown(
    running_sum: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = tmp_path / "model.json"
    description.write_text(
        '{"model_type": "longrecall", "vocab_size": 258, "hidden_size": 16, '
        '"layers": [{"repeat": 2, "mixer": {"type": "running_sum", "width": 4}}]}'
    )
    assert main(["init", str(description), str(tmp_path / "fresh")]) == 0
    capsys.readouterr()
    assert main(["info", str(tmp_path / "fresh")]) == 0
    assert "running_sum" in capsys.readouterr().out
    with pytest.raises(UserError, match="running_sum"):
        mixer_config({"type": "running_sun"})
