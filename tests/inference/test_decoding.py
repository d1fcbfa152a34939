"""The decoding step that owns its buffers, and the loop around it, against the model's own forward pass."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longrecall.errors import UserError
from longrecall.inference import generation
from longrecall.inference.eligibility import why_no_graph, why_not_fixed
from longrecall.inference.generation import decode
from longrecall.inference.reading import read_prompt, why_no_segments
from longrecall.inference.segments import EAGER_FIRST, CapturedSegments, Kind, StateBlocks
from longrecall.inference.step import DecodingStep
from longrecall.layers.stepping.step import PlainStep, StepSettings, step_of
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import fixed_shapes
from tests.conftest import MIXERS

FIXED = [
    name
    for name, mixer in MIXERS.items()
    if why_not_fixed(RecurrentLM(RecurrentConfig(vocab_size=8, hidden_size=32, layers=[{"mixer": mixer}]))) is None
]


def model_of(mixer: dict[str, Any], seed: int = 0) -> RecurrentLM:
    torch.manual_seed(seed)
    config = RecurrentConfig(vocab_size=40, hidden_size=32, layers=[{"mixer": mixer, "mlp_size": 24}, {"mixer": mixer}])
    model = RecurrentLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def assert_exports(step: DecodingStep, state: RecurrentState) -> None:
    """That a step gives back this state, but for float32 sums in another order."""
    kept = step.export()
    assert kept.length == state.length and torch.equal(kept.position, state.position)
    for found, expected in zip(kept.layers, state.layers, strict=True):
        assert found.keys() == expected.keys()
        for key in found:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


def has_kernels(name: str) -> bool:
    model = model_of(MIXERS[name])
    settings = StepSettings(1, 0, True, torch.float32, torch.float32, model.model.embeddings)
    layer = cast(RecurrentLayer, model.model.layers[0])
    return not isinstance(step_of(layer.mixer_config, layer.mixer, settings), PlainStep)


KERNELS = [name for name in FIXED if has_kernels(name)]
CASES = [(name, 3, False) for name in FIXED] + [(name, batch, True) for name in KERNELS for batch in (1, 5)]


@pytest.mark.parametrize(("name", "batch", "fused"), CASES)
@torch.no_grad()
def test_steps_equal_forward_passes(name: str, batch: int, fused: bool) -> None:
    """Fused steps run in Triton's interpreter here: batch 1 with the products in kernels, batch 5 without."""
    if fused:
        pytest.importorskip("triton")
    model = model_of(MIXERS[name])
    generator = torch.Generator().manual_seed(1)
    state = model(torch.randint(0, 40, (batch, 7), generator=generator)).past_key_values
    step = DecodingStep(model, batch, fused=fused)
    step.load(state)
    for _ in range(2):
        ids = torch.randint(0, 40, (batch,), generator=generator)
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        # float32 sums in another order, through two layers.
        torch.testing.assert_close(step(), out.logits[:, -1], rtol=1e-4, atol=1e-5)
    assert_exports(step, state)


@torch.no_grad()
def test_a_loaded_state_is_copied_and_an_export_is_a_value() -> None:
    model = model_of(MIXERS["gla_conv"])
    state = model(torch.arange(6)[None]).past_key_values
    before = copy.deepcopy(state)
    step = DecodingStep(model, 1)
    step.load(state)
    first = step.export()
    kept = copy.deepcopy(first)
    step()
    for a, b in ((state, before), (first, kept)):
        assert all(torch.equal(x[key], y[key]) for x, y in zip(a.layers, b.layers, strict=True) for key in x)


def test_a_model_with_a_growing_cache_says_why_it_cannot() -> None:
    model = model_of(MIXERS["attention"])
    assert "layer 0 (attention)" in str(why_not_fixed(model))
    assert "cpu" in str(why_no_graph(model_of(MIXERS["gla"])))
    model.decoding.graphs = False
    assert "is off" in str(why_no_graph(model))


def test_a_state_type_that_cannot_be() -> None:
    model = model_of(MIXERS["gla"])
    model.decoding.state_dtype = torch.float16
    with pytest.raises(UserError, match="float16"):
        model.decoding.check()


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> list[DecodingStep]:
    """generate() through the step, without a GPU: the step runs eagerly."""
    made: list[DecodingStep] = []

    def eager(model: RecurrentLM, batch: int, room: int, where: Any) -> DecodingStep:
        assert not room
        made.append(DecodingStep(model, batch, model.decoding.state_dtype))
        return made[-1]

    monkeypatch.setattr(generation, "captured_step", eager)
    monkeypatch.setattr(generation, "why_no_graph", why_not_fixed)
    return made


PROMPTS = [[5, 6, 7, 8, 9], [0, 0, 3, 1, 2]]
MASK = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


def generate(model: RecurrentLM, **options: Any) -> Tensor:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(torch.tensor(PROMPTS), attention_mask=torch.tensor(MASK), **settings)  # type: ignore


@pytest.mark.parametrize("name", ["gla_conv", "gated_delta_net", "mamba2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": [3, 17, 21, 30]},
        {"eos_token_id": list(range(20)), "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0},
        {"do_sample": True, "num_return_sequences": 3, "eos_token_id": [3, 17, 21]},
    ],
)
def test_generate_gives_the_same_tokens(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model = model_of(MIXERS[name])
    expected = generate(model, **options)
    made = request.getfixturevalue("stepwise")
    assert torch.equal(generate(model, **options), expected)
    assert len(made) == 1


def test_what_the_loop_does_not_do_goes_to_transformers(stepwise: list[DecodingStep]) -> None:
    model = model_of(MIXERS["gla"])
    generate(model, num_beams=2)
    generate(model, return_dict_in_generate=True)
    generate(model, use_cache=False, max_new_tokens=3)
    generate(model_of(MIXERS["attention"]))
    assert stepwise == []


def test_a_graph_that_cannot_be_captured_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: RecurrentLM, batch: int, room: int, where: Any) -> DecodingStep:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    model = model_of(MIXERS["gla"])
    expected = generate(model)
    monkeypatch.setattr(generation, "captured_step", refused)
    monkeypatch.setattr(generation, "why_no_graph", why_not_fixed)
    with pytest.warns(UserWarning, match="without a CUDA graph, which failed: CUDA out of memory"):
        found = generate(model)
    assert torch.equal(found, expected)


def test_streaming_shows_every_token_once(stepwise: list[DecodingStep]) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.seen.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    model = model_of(MIXERS["gla"])
    streamer = Streamer()
    torch.manual_seed(0)
    written = model.generate(torch.tensor([[4, 5]]), max_new_tokens=6, eos_token_id=None, streamer=streamer)  # type: ignore
    assert [token for part in streamer.seen for token in part] == written[0].tolist()
    assert streamer.ended and len(stepwise) == 1


def test_rows_end_on_their_own() -> None:
    """Tokens follow a script; what is written after the last end is cut off, earlier rows are filled up."""
    script = torch.tensor([[1, 9, 7, 7, 7, 7], [2, 3, 4, 9, 7, 7]])

    class Scripted:
        ids = torch.zeros(2, dtype=torch.long)

        def __call__(self) -> Tensor:
            return torch.zeros(2, 10)

    def sample(ids: Tensor, logits: Tensor) -> Tensor:
        return script[:, ids.shape[1] - 1]

    start = torch.tensor([[5], [6]])
    found = decode(Scripted(), start, torch.zeros(2, 10), sample, most=7, end=torch.tensor([9]), pad=0)  # type: ignore
    assert found.tolist() == [[5, 1, 9, 0, 0], [6, 2, 3, 4, 9]]
    unlimited = decode(Scripted(), start, torch.zeros(2, 10), sample, most=7, end=None, pad=0)  # type: ignore
    assert unlimited[:, 1:].tolist() == script.tolist()


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(("length", "rests"), [(6, 0), (13, 0), (13, EAGER_FIRST), (5, EAGER_FIRST), (17, EAGER_FIRST)])
@torch.no_grad()
def test_a_prompt_in_segments_equals_one_pass(name: str, length: int, rests: int) -> None:
    """Segments of 6 tokens; the rest eagerly, or as a part of one of 4 or 6."""
    model = model_of(MIXERS[name])
    ids = torch.randint(0, 40, (2, length), generator=torch.Generator().manual_seed(2))
    before = model(ids[:, :3]).past_key_values
    whole = model(ids, past_key_values=before)
    segments = CapturedSegments(model, 2, lengths=(4, 6))
    segments.rests = rests
    logits, state = read_prompt(model, segments, ids, before)
    # float32 sums in another order, through two layers.
    torch.testing.assert_close(logits, whole.logits[:, -1], rtol=1e-4, atol=1e-5)
    assert state.length == 3 + length and state.position.tolist() == [3 + length] * 2
    for found, expected in zip(state.layers, whole.past_key_values.layers, strict=True):
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


def test_which_prompts_are_read_in_segments() -> None:
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert why_no_segments(ids, None) is None and why_no_segments(ids, torch.ones_like(ids)) is None
    assert "rows" in str(why_no_segments(ids.expand(5, -1), None))
    assert "padded" in str(why_no_segments(ids, torch.tensor([[0, 1, 1, 1, 1]])))


@torch.no_grad()
def test_rests_are_read_in_segments_once_they_are_common(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MIXERS["gated_delta_net"])
    segments = CapturedSegments(model, 1, lengths=(4, 6))
    ran: list[Kind] = []
    run = CapturedSegments._run
    monkeypatch.setattr(CapturedSegments, "_run", lambda self, kind: [ran.append(kind), run(self, kind)])
    ids = torch.arange(17)[None]
    # Padding comes last there, and nothing is sorted to find that out.
    monkeypatch.setattr(torch, "argsort", None)
    for prompt in (ids[:, :3], ids[:, :6], ids[:, :3], ids[:, :4], ids):
        logits, state = read_prompt(model, segments, prompt, None)
        whole = model(prompt)
        # float32 sums in another order, through two layers.
        torch.testing.assert_close(logits, whole.logits[:, -1], rtol=1e-4, atol=1e-5)
        assert state.length == prompt.shape[1]
    assert [kind[:2] for kind in ran] == [(6, False), (4, True), (4, False), (6, False), (6, False), (6, True)]


def test_a_segment_is_recorded_whatever_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording begins with an eager run, whose padding may not be that of a longer segment."""
    segments = CapturedSegments(model_of(MIXERS["gated_delta_net"]), 1, lengths=(4, 6))
    monkeypatch.setattr("longrecall.inference.segments.record", lambda work, *_, **__: work() or Mock())
    monkeypatch.setattr("longrecall.inference.segments.recording_stream", lambda device: None)
    segments.read(torch.arange(12)[None])
    segments._capture(Kind(4, True))
    assert int(segments.count) == 1


class NoValues(TorchDispatchMode):
    """Refuses what waits for a GPU, which no graph can: reading numbers back, or as many of them as a mask says."""

    waits: ClassVar[set[Any]] = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.repeat_interleave.Tensor,
    }
    chooses: ClassVar[set[Any]] = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func in self.chooses and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert func not in self.waits and not masks, f"{func} in a segment"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FIXED)
def test_segments_never_wait_for_values(name: str) -> None:
    segments = CapturedSegments(model_of(MIXERS[name]), 2, lengths=(70, 100))
    with fixed_shapes(), NoValues():
        for kind in (Kind(100, False), Kind(70, False), Kind(70, True)):
            segments._run(kind)


def test_waiting_for_values_is_noticed() -> None:
    x = torch.ones(3)
    for waits in (lambda: bool(x.all()), lambda: x[x > 0], lambda: x.nonzero(), lambda: x.sum().item()):
        with pytest.raises(AssertionError, match="in a segment"), NoValues():
            waits()


def test_what_a_mixer_hands_on_as_it_was_is_written_back() -> None:
    model = model_of(MIXERS["gated_delta_net"])
    blocks = StateBlocks(model.zero_state(2))
    new, kept = blocks.export(0), blocks.export(0)
    new.layers[0]["recurrent"].fill_(3.0)
    mixed = ({**new.layers[0], "q_conv": blocks.layers[0]["q_conv"]}, *new.layers[1:])
    blocks.write(mixed, torch.tensor([4, 5]))
    assert bool((blocks.layers[0]["recurrent"] == 3.0).all()) and blocks.position.tolist() == [4, 5]
    # What was exported before is a value of its own.
    assert not bool(kept.layers[0]["recurrent"].any()) and kept.position.tolist() == [0, 0]


def test_a_copy_of_a_model_starts_without_captured_steps() -> None:
    model = model_of(MIXERS["gla"])
    model.captured_steps[(1, None)] = object()
    assert copy.deepcopy(model).captured_steps == {}
    assert pickle.loads(pickle.dumps(model.captured_steps)) == {}
