"""Decoding on a CPU by recorded calls: the same numbers as the model's own forward pass, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from longrecall.inference import recorded_step
from longrecall.inference.eligibility import why_no_recording
from longrecall.inference.recorded_calls import NotRecordable, RecordedCalls
from longrecall.inference.recorded_step import RecordedStep
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS
from tests.inference.test_decoding import FIXED, model_of

READS_SIZES = {"mom", "mom_linear"}
"""Mixers that read sizes back from the device: their calls are others for every token."""


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded at once."""
    monkeypatch.setattr(recorded_step, "PLAIN_FIRST", 1)


def step_of(model: RecurrentLM, batch: int = 1) -> RecordedStep:
    (step,) = (step for key, step in model.captured_steps.items() if key[:2] == ("recorded", batch))
    assert isinstance(step, RecordedStep)
    return step


@pytest.mark.parametrize("name", FIXED)
def test_recorded_calls_give_the_same_numbers(name: str) -> None:
    model = model_of(MIXERS[name])
    # Both ways in turn, for half the time.
    dtype, rows = ((torch.float32, 1), (torch.bfloat16, 3))[FIXED.index(name) % 2]
    model.to(dtype)
    ids = torch.randint(0, 40, (rows, 10), generator=torch.Generator().manual_seed(1))
    step = RecordedStep(model, rows)
    with torch.no_grad():
        state = model(ids[:, :5]).past_key_values
        # Twice: what was recorded serves another text.
        for _ in range(2):
            step.load(state)
            after = state
            for column in range(5, 10):
                out = model(ids[:, column : column + 1], past_key_values=after)
                after = out.past_key_values
                step.ids.copy_(ids[:, column])
                assert torch.equal(step(), out.logits[:, -1])
    assert (step.calls is None) == (name in READS_SIZES), step.why_plain


class NeverSeven(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([7]), -torch.inf)


class Long(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 20)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "ends": lambda: {"eos_token_id": [3, 11, 19]},
    "top-k": lambda: {"do_sample": True, "temperature": 0.7, "top_k": 12},
    "top-p, min-p, penalty": lambda: {"do_sample": True, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    "several": lambda: {"do_sample": True, "num_return_sequences": 2},
    "processor": lambda: {"logits_processor": LogitsProcessorList([NeverSeven()])},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([Long()])},
    "scores": lambda: {"return_dict_in_generate": True, "output_scores": True},
    "beams": lambda: {"num_beams": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_generate_writes_the_same_tokens(name: str) -> None:
    model = model_of(MIXERS["mamba2"]).bfloat16()
    ids = torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(2))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for rows, mask in ((1, None), (3, padded)):
        found = []
        for graphs in (False, True):
            model.decoding.graphs = graphs
            torch.manual_seed(3)
            options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **OPTIONS[name]()}
            out = model.generate(ids[:rows], attention_mask=mask, **options)
            found.append(
                (out if isinstance(out, Tensor) else torch.cat([out.sequences, *out.scores], 1), torch.rand(1))
            )
        # The random numbers after it too: as many were drawn.
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_weights_that_change_are_the_ones_that_count() -> None:
    model = model_of(MIXERS["gla"]).bfloat16()
    ids = torch.randint(0, 40, (1, 7), generator=torch.Generator().manual_seed(2))

    def both() -> None:
        found = []
        for graphs in (False, True):
            model.decoding.graphs = graphs
            found.append(model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0))
        assert torch.equal(*found)

    both()
    recorded = step_of(model).calls
    assert recorded is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    both()
    assert step_of(model).calls is recorded
    model.model.layers[0].mixer.o_norm.weight = nn.Parameter(-model.model.layers[0].mixer.o_norm.weight.detach())
    both()
    assert step_of(model).calls is not recorded
    model.float()
    both()
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: (-out[0], *out[1:]))
    assert "hooks" in str(why_no_recording(model))
    both()
    handle.remove()
    model.model.layers[0].compile(backend="eager")
    assert why_no_recording(model) == "its layers are compiled"


def test_what_cannot_be_recorded_says_why() -> None:
    given, weight = torch.ones(1, 2), torch.ones(2)
    cases: list[tuple[Callable[..., list[Tensor]], str]] = [
        (lambda x, s: [x * float(s), s], "reads numbers back"),
        (lambda x, s: [x * s.tolist()[0], s], "reads numbers back"),
        (lambda x, s: [x[x > 0], s], "reads numbers back"),
        (lambda x, s: [torch.rand_like(x), s], "random"),
        (lambda x, s: [weight.add_(1), s], "was there before"),
        (lambda x, s: [x, s.add_(1)], "was there before"),
        (lambda x, s: [x, torch.cat([s, s])], "shape"),
    ]
    for function, reason in cases:
        with pytest.raises(NotRecordable, match=reason):
            RecordedCalls(function, given, [torch.ones(1)])
    assert torch.equal(weight, torch.ones(2))


def test_states_may_change_places_and_share_memory() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        zeros = torch.zeros(2)
        zeros += x
        return [zeros + a.view(2), b, a[[1, 0]], c.roll(1).view(2)]

    state = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])]
    recorded = RecordedCalls(function, torch.zeros(2), state)
    for step in range(3):
        with torch.inference_mode():
            recorded.given.fill_(step)
        expected, *state = function(torch.full((2,), float(step)), *state)
        assert torch.equal(recorded(), expected)
        assert all(torch.equal(x, y) for x, y in zip(recorded.state, state, strict=True))
