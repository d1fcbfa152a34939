"""What a model keeps of captured work: when it is made anew, when it is given up, and who may use it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from longrecall.inference import generation, reading, segments
from longrecall.inference import step as step_module
from longrecall.inference.as_built import why_not_as_built
from longrecall.inference.eligibility import why_no_step, why_not_fixed
from longrecall.inference.reading import captured_segments, captured_step
from longrecall.inference.segments import CapturedSegments
from longrecall.inference.step import DecodingStep
from longrecall.models.captured_steps import KEPT, addresses, kept, modules_of, tensors_of
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS
from tests.inference.test_decoding import model_of
from tests.inference.test_decoding_attention import model_of as attention_model

PROMPT = torch.tensor([[5, 6, 7, 8]])


class Recorded:
    """A graph as far as a CPU can stand in for it: what was recorded under autocast is replayed so anywhere."""

    def __init__(self, work: Any, warmups: int, stream: Any, **_: Any) -> None:
        # A graph knows nothing of Python's objects.
        self.work = weakref.WeakMethod(work)
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        for _ in range(warmups):
            work()

    def replay(self) -> None:
        enabled, dtype = self.autocast
        work = self.work()
        assert work is not None
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            work()


@pytest.fixture(autouse=True)
def plain_arithmetic() -> Iterator[None]:
    """float32 products as torch begins with, whatever ran before in this process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() and captured steps as on a GPU, with `Recorded` in place of graphs."""
    for module in (step_module, segments):
        monkeypatch.setattr(module, "record", Recorded)
        monkeypatch.setattr(module, "recording_stream", lambda device: None)
    monkeypatch.setattr(generation, "why_no_graph", why_no_step)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without Python's search for cycles: what is freed is freed at once, as a GPU's memory has to be."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def generate(model: RecurrentLM, **options: Any) -> Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None} | options
    mask = torch.ones_like(PROMPT)
    return model.generate(PROMPT, attention_mask=mask, **settings)  # type: ignore[no-any-return, operator]


@torch.no_grad()
def test_autocast_has_steps_of_its_own(recorded: None) -> None:
    model = model_of(MIXERS["gla"])
    state = model(PROMPT).past_key_values
    for enabled in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            step = captured_step(model, 1)
            step.load(state)
            expected = model(torch.zeros(1, 1, dtype=torch.long), past_key_values=state).logits[:, 0]
            step.ids.zero_()
            found = step()
            assert captured_step(model, 1) is step
            # The same operations on the same numbers.
            assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert list(model.captured_steps) == [("step", 1, None), ("step", 1, None, torch.bfloat16)]


def test_other_arithmetic_is_recorded_again(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MIXERS["gla"])
    plain = captured_step(model, 1)
    torch.set_float32_matmul_precision("high")
    rough = captured_step(model, 1)
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setenv("LONGRECALL_BACKEND", "reference")
    assert captured_step(model, 1) not in (plain, rough) and rough is not plain
    monkeypatch.delenv("LONGRECALL_BACKEND")
    assert captured_step(model, 1) is plain


@torch.no_grad()
def test_a_buffer_that_was_replaced_is_recorded_again(recorded: None) -> None:
    model = model_of(MIXERS["handover"])
    step = captured_step(model, 1)
    model.model.layers[0].mixer.progress.fill_(0.5)
    assert captured_step(model, 1) is step
    model.model.layers[0].mixer.progress = torch.tensor(1.0)
    assert captured_step(model, 1) is not step


def test_what_moved_gives_its_memory_back(recorded: None, uncollected: None) -> None:
    model = model_of(MIXERS["gla"])
    captured_step(model, 1)
    segments = weakref.ref(captured_segments(model, 1))
    model.to("cpu")
    assert len(model.captured_steps) == 2
    model.to(torch.bfloat16)
    assert not model.captured_steps and segments() is None
    step = captured_step(model, 1)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    # Whichever is asked for next, all the others are of no use any more.
    captured_segments(model, 2)
    assert step not in model.captured_steps.values() and len(model.captured_steps) == 1


def test_a_forward_pass_may_move_weights(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As offloading does around the whole model: the step is that of where they lie after the prompt was read."""
    monkeypatch.setattr(reading, "why_no_segments", lambda ids, mask: "read by forward passes alone")
    model = attention_model("full")
    generate(model)
    first, forward = captured_step(model, 1, 16), model.forward

    def moving(*arguments: Any, **options: Any) -> Any:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return forward(*arguments, **options)

    model.forward = moving
    generate(model)
    steps = [kept for key, kept in model.captured_steps.items() if key[0] == "step"]
    assert len(steps) == 1 and first not in steps


def test_few_are_kept_and_the_oldest_goes_first(recorded: None) -> None:
    model = model_of(MIXERS["gla"])
    held: list[int] = []
    for key in range(KEPT + 2):
        kept(model.captured_steps, model, (key,), lambda: held.append(len(model.captured_steps)))
    # While one is made there are no more than that beside it.
    assert held == [0, 1, 2, 3, 3, 3] and list(model.captured_steps) == [(2,), (3,), (4,), (5,)]


def test_a_model_is_not_held_by_its_steps(recorded: None, uncollected: None) -> None:
    model = attention_model("hymba")
    generate(model)
    segmented = model_of(MIXERS["gla"])
    for _ in range(3):
        generate(segmented)
    assert model.captured_steps and len(segmented.captured_steps) == 2
    references = [weakref.ref(model), weakref.ref(segmented), weakref.ref(captured_segments(segmented, 1))]
    del model, segmented
    assert [reference() for reference in references] == [None] * 3


@pytest.fixture
def short_of_memory(recorded: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Captures fail, with all buffers made, as long as more than one step with room is alive; the steps made."""
    made: list[Any] = []
    capture = DecodingStep.capture

    def limited(self: DecodingStep) -> None:
        made.append(weakref.ref(self))
        if sum(step() is not None for step in made) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 51 GiB")
        capture(self)

    monkeypatch.setattr(DecodingStep, "capture", limited)
    return made


def test_older_rooms_make_place_for_a_new_one(short_of_memory: list[Any], uncollected: None) -> None:
    model = attention_model("full")
    captured_step(model, 1, 10)
    captured_step(model, 4, 10)
    assert list(model.captured_steps) == [("step", 4, None, 4096)]
    # The second one failed beside the first, and was freed.
    assert [step() is None for step in short_of_memory] == [True, True, False]
    assert torch.equal(generate(model), generate(model))


def test_a_room_is_taken_once() -> None:
    """Also while it is made: what else there was of it could not be had where memory is short."""
    made: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() > 1 and out.shape[1] == 4099:
                # Held, so that no two lie at the same place.
                made.append(out)
            return out

    model = attention_model("full")
    with Watch():
        step = DecodingStep(model, 2, room=4099)
    assert sorted(step.buffers[0]) == ["key", "position", "value"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 3


def test_without_memory_the_plain_path_goes_on(
    recorded: None, uncollected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attention_model("full")
    monkeypatch.setattr(generation, "why_no_graph", lambda model: "off")
    expected = generate(model)
    monkeypatch.setattr(generation, "why_no_graph", why_no_step)
    made: list[Any] = []

    def refused(self: DecodingStep, *_: Any) -> None:
        made.append(weakref.ref(self))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 51 GiB")

    for method in ("load", "capture"):
        with monkeypatch.context() as patched:
            patched.setattr(DecodingStep, method, refused)
            with pytest.warns(UserWarning, match="51 GiB .room for 16 tokens .* smaller max_new_tokens takes less"):
                found = generate(model)
        assert torch.equal(found, expected)
        assert not model.captured_steps and all(step() is None for step in made)
    # A capture is tried a second time, once the segments that were kept are gone.
    assert len(made) == 3


def test_steps_and_segments_have_no_gradients() -> None:
    for model in (model_of(MIXERS["gla"]), attention_model("full")):
        step = DecodingStep(model, 2, room=0 if why_not_fixed(model) is None else 9)
        step.load(model(PROMPT.expand(2, -1)).past_key_values)
        step()
        assert not step().requires_grad
        assert not any(tensor.requires_grad for buffers in step.buffers for tensor in buffers.values())
    segments = CapturedSegments(model_of(MIXERS["gla"]), 1, lengths=(4,))
    assert not segments.read(PROMPT).requires_grad


@pytest.mark.parametrize("threads", [False, True])
def test_who_is_not_alone_decodes_without_the_steps(threads: bool, recorded: None) -> None:
    """One begins while another is in the middle: from its streamer, or in another thread."""
    model = model_of(MIXERS["gated_delta_net"])
    expected = generate(model), generate(model, num_return_sequences=1, max_new_tokens=7)
    inner: list[Tensor] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            if value.numel() == 1 and not inner:
                other = threading.Thread(target=lambda: inner.append(generate(model, max_new_tokens=7)))
                if threads:
                    other.start()
                    other.join()
                else:
                    other.run()

        def end(self) -> None:
            pass

    assert torch.equal(generate(model, streamer=Streamer()), expected[0])
    assert torch.equal(inner[0], expected[1])
    with model.captured_steps.alone() as alone:
        assert alone


def test_the_steps_are_free_again_after_an_error(recorded: None) -> None:
    model = model_of(MIXERS["gla"])
    with contextlib.suppress(KeyboardInterrupt), model.captured_steps.alone():
        raise KeyboardInterrupt
    with model.captured_steps.alone() as first, model.captured_steps.alone() as second:
        assert first and not second


def test_what_a_step_would_pass_over() -> None:
    model = model_of(MIXERS["gla"])
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert why_not_as_built(model) is None
    linear = model.model.layers[1].mixer.q_proj
    for add in (linear.register_forward_hook, linear.register_forward_pre_hook, model.register_forward_hook):
        handle = add(lambda *_: None)
        assert "has forward hooks" in str(why_not_as_built(model))
        handle.remove()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    assert "global forward hooks" in str(why_not_as_built(model))
    handle.remove()
    assert why_not_as_built(model) is None
    linear.forward = lambda x: x
    assert "q_proj has another forward method" in str(why_not_as_built(model))
    del linear.forward

    class Adapter(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj = Adapter(32, 24, bias=False)
    assert "layers.0.mlp.up_proj is a module of another package (tests" in str(why_not_as_built(model))
    model = model_of(MIXERS["gla"])
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mixer.q_proj)
    assert "layers.1.mixer.q_proj has weights that are computed" in str(why_not_as_built(model))
    model = model_of(MIXERS["gla"])
    model.model.layers[1].to("meta")
    assert "several devices" in str(why_not_as_built(model))

    class Quantised(Tensor):
        pass

    model = model_of(MIXERS["gla"])
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Quantised))
    assert "(Quantised)" in str(why_not_as_built(model))


def test_addresses_know_types() -> None:
    model = model_of(MIXERS["gla"])
    before = addresses(model)
    model.model.norm.weight.data = model.model.norm.weight.data.view(torch.int32).view(torch.float32)
    assert addresses(model) == before
    square = nn.Linear(4, 4)
    upright = addresses(square)
    square.weight.data = square.weight.data.t()
    assert addresses(square) != upright
    model.model.norm.weight.data = model.model.norm.weight.data[:16]
    assert addresses(model) != before


@pytest.mark.parametrize("name", ["gla", "hymba", "handover"])
def test_every_module_and_tensor_is_looked_at(name: str) -> None:
    model = model_of(MIXERS[name])
    first, second = model.model.layers[0], model.model.layers[1]
    # Shared, absent, around in a circle, and behind what was met before.
    second.mixer_norm, first.absent, first.around = first.mixer_norm, None, nn.ModuleDict({"back": model.model})
    first.mixer_norm.register_module("nothing", None)
    first.mixer_norm.deep = nn.Sequential(nn.BatchNorm1d(3))
    found = modules_of(model)
    assert found[0] is model and set(found) == set(model.modules())
    expected = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert {id(tensor) for tensor in tensors_of(found)} == expected
