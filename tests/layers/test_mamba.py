"""The Mamba layer's initialisation; what it computes is tested against transformers in test_formats_mamba.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

MIXER = {"type": "mamba", "inner_dim": 96, "state_dim": 4, "dt_rank": 9}


def test_a_fresh_model_begins_as_the_paper_says() -> None:
    torch.manual_seed(0)
    mixer = RecurrentLM(RecurrentConfig(hidden_size=48, layers=[{"mixer": MIXER}])).model.layers[0].mixer
    # Also after the model has gone over its linear layers with an initialisation of its own.
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 5).expand(96, 4))
    steps = F.softplus(mixer.dt_proj.bias.detach())
    # Log-uniform in 0.001..0.1: of 96 draws at least one lies in each of the outer quarters.
    assert 0.001 <= float(steps.min()) < 0.0032 and 0.032 < float(steps.max()) <= 0.1001
    bound = float(mixer.dt_proj.weight.detach().abs().max())
    assert 0.9 / 3 < bound <= 1 / 3 and bool((mixer.D == 1).all())


def test_sizes_are_checked() -> None:
    with pytest.raises(UserError, match="dt_rank must be a positive whole number"):
        mixer_config(MIXER | {"dt_rank": 0})
    with pytest.raises(UserError, match='no field "head_dim"'):
        mixer_config(MIXER | {"head_dim": 16})
