"""Context parallelism of whole models: four processes and two (gloo, CPU) compute what one does."""

from __future__ import annotations

import pytest
import torch

from longrecall.context import ContextGroup, context_parallel, own_piece
from longrecall.errors import UserError
from longrecall.layers.mixers import registry
from longrecall.models.config import RecurrentConfig
from longrecall.models.packed_documents import find_fragments
from longrecall.models.recurrent_lm import RecurrentLM
from tests import warm
from tests.conftest import MIXERS
from tests.context import models

FOURTH = ContextGroup(object(), 3, 4)
"""Rank 3 of four that are not there."""


@pytest.mark.long
@pytest.mark.parametrize("names", [(), pytest.param(("twins",), marks=pytest.mark.slow)], ids=["", "twins"])
def test_whole_models_over_two_and_four_ranks(names: tuple[str, ...]) -> None:
    """Loss, logits, states passed on and every gradient; with padding, and with packed documents."""
    done = warm.run(models.main, *names)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_mixer_reads_pieces() -> None:
    """A new type is to be in a model that is cut over ranks."""
    configs = [RecurrentConfig(**{"hidden_size": 32} | changes) for changes in models.MODELS.values()]
    layers = [layer for config in configs for layer in config.layer_configs()]
    modules = [module for layer in layers for _, part in layer.parts() for module in part.with_inner()]
    assert {module.type for module in modules} == set(registry.MIXERS)


def test_what_cannot_be_cut_is_refused() -> None:
    assert own_piece(torch.arange(8)[None], FOURTH).tolist() == [[6, 7]]
    with pytest.raises(UserError, match="a sequence of 41 tokens is not divided by the 4 ranks of a context group"):
        own_piece(torch.zeros(1, 41), FOURTH)
    model = RecurrentLM(RecurrentConfig(hidden_size=32, layers=[{"mixer": MIXERS["gla"]}]))
    ids = torch.zeros(1, 4, dtype=torch.long)
    with context_parallel(FOURTH):
        with pytest.raises(UserError, match=r"generate\(\) does not run under context parallelism"):
            model.generate(ids, max_new_tokens=2)
        model.model.layers[0].compile()
        with pytest.raises(UserError, match="compiled layers do not run under context parallelism"):
            model(ids)
        with pytest.raises(ValueError, match="cu_seqlens must increase from 0 to 16"):
            find_fragments(torch.tensor([0, 4]), 1, 4)
