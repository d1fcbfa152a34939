"""Modules that torch itself puts in a layer's place, and forward passes that others have wrapped around a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

from longrecall.inference.as_built import why_not_as_built
from longrecall.inference.reading import captured_step
from tests.conftest import MIXERS
from tests.inference.test_captured_steps import generate, recorded  # noqa: F401
from tests.inference.test_decoding import model_of


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning")
@pytest.mark.parametrize("original", [True, False])
def test_sharded_layers_are_not_passed_over(alone: None, original: bool) -> None:
    """What they call their weights is a view of a buffer that is only filled while the layer runs."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = model_of(MIXERS["gla"])
    whole = model.model.layers[0]
    cpu = torch.device("cpu")
    model.model.layers[0] = FullyShardedDataParallel(whole, use_orig_params=original, device_id=cpu)
    assert "layers.0 is a module of another package (torch.distributed" in str(why_not_as_built(model))


def test_quantised_layers_are_not_passed_over() -> None:
    # One of the real ones may not be made without a warning that torch will drop them.
    kind = type("Linear", (nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})
    model = model_of(MIXERS["gla"])
    model.model.layers[0].mixer.q_proj = kind(32, 32)
    assert "q_proj is a module of another package (torch.ao" in str(why_not_as_built(model))


def test_a_forward_pass_that_reads_the_rest_of_a_prompt_may_move_weights(recorded: None) -> None:  # noqa: F811
    """As in one that reads the whole prompt: the step is that of where they lie afterwards."""
    model = model_of(MIXERS["gla"])
    # Nothing was generated before: segments leave the first rests to it.
    first, forward = captured_step(model, 1), model.forward

    def moving(*arguments: Any, **options: Any) -> Any:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return forward(*arguments, **options)

    model.forward = moving
    generate(model)
    assert first not in model.captured_steps.values()
