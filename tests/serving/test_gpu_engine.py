"""The engine on a GPU: captured steps of any number of rows, tokens told while the next one is under way."""

from __future__ import annotations

import random
import time

import pytest
import torch

from longrecall import Engine
from tests.serving.test_engine import MODELS, SAMPLED, generated, model_of, prompts_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("slots", [9, 70])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(name: str, slots: int) -> None:
    """Rows come, go and move to others' places; prompts are read side by side, beside steps, and in long segments."""
    model, prompts, chance = model_of(name).cuda(), prompts_of(40), random.Random(1)
    prompts += [prompt * 30 for prompt in prompts[:4]] + prompts_of(slots, longest=200, seed=2)
    wanted = [1 + 7 * index % 40 for index in range(len(prompts))]
    with Engine(model, slots=slots, queue=200, segment=512) as engine:
        requests = []
        for prompt, count in zip(prompts, wanted, strict=True):
            requests.append(engine.submit(prompt, max_new_tokens=count))
            time.sleep(chance.choice((0, 0, 0.002)))
        found = [request.result().ids for request in requests]
        again = [engine.submit(prompts[0], max_new_tokens=9, **options, seed=3).result().ids for options in SAMPLED]
        endless = engine.submit([1], max_new_tokens=10**3)
        assert again == [
            engine.submit(prompts[0], max_new_tokens=9, **options, seed=3).result().ids for options in SAMPLED
        ]
        endless.cancel()
    expected = []
    for prompt, count in zip(prompts, wanted, strict=True):
        expected.append(generated(model, prompt, count))
    assert found == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_that_is_not_the_current_one(name: str) -> None:
    """Tokens are told when their own GPU has them, not when the current one has nothing to do."""
    model, prompts = model_of(name).to("cuda:1"), prompts_of(24, longest=90)
    with Engine(model, slots=8, queue=100) as engine:
        found = [result.ids for result in engine.generate(prompts, max_new_tokens=30)]
    assert found == [generated(model, prompt, 30) for prompt in prompts]
