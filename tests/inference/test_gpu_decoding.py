"""Captured decoding steps on a GPU: tokens, logits and states against decoding layer by layer."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from longrecall.inference.reading import captured_segments, captured_step, read_captured, read_prompt
from longrecall.inference.segments import SEGMENT
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import whole_texts
from tests.conftest import MIXERS
from tests.inference.test_decoding import FIXED, model_of
from tests.inference.test_decoding_attention import LAYERS
from tests.inference.test_decoding_attention import model_of as attention_model
from tests.inference.test_decoding_retrieval import model_of as retrieval_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPT = torch.arange(3 * 11).view(3, 11) % 40


def generate(model: RecurrentLM, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    ids = PROMPT.cuda()
    settings: dict[str, Any] = {"max_new_tokens": 50, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "eos_token_id": [3, 8]}])
def test_generate_gives_the_same_tokens_as_without_a_graph(name: str, options: dict[str, Any]) -> None:
    model = model_of(MIXERS[name]).cuda()
    model.decoding.graphs = False
    expected = generate(model, **options)
    model.decoding.graphs = True
    assert torch.equal(generate(model, **options), expected)
    # The second time from the kept graph, and with the prompt in a captured segment.
    assert torch.equal(generate(model, **options), expected)
    assert torch.equal(generate(model, **options), expected)
    assert list(model.captured_steps) == [("segments", 3), ("step", 3, None)]


CHOICES: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "eos_token_id": [3]},
    {"do_sample": True, "min_p": 0.1, "typical_p": 0.9},
    {"eos_token_id": [7], "max_new_tokens": 90},
    {"repetition_penalty": 1.3},
    {"max_new_tokens": 15},
]


def test_choices_give_the_same_tokens_in_any_order() -> None:
    """Captured with the step one after the other, also where a text has filled the room before."""
    models = [model_of(MIXERS["gla_conv"]), attention_model(next(iter(LAYERS)))]
    for model in (one.cuda() for one in models):
        for options in (*CHOICES, *reversed(CHOICES)):
            model.decoding.graphs = False
            expected = generate(model, **options)
            model.decoding.graphs = True
            assert torch.equal(generate(model, **options), expected), options


@pytest.mark.parametrize("name", FIXED)
def test_plain_calls_in_captured_segments(name: str) -> None:
    model = model_of(MIXERS[name]).cuda()
    ids = torch.arange(700, device="cuda").view(1, 700) * 7 % 40
    with torch.no_grad():
        with whole_texts():
            expected = model(ids)
        for _ in range(3):
            found = model(ids)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)
        assert ("segments", 1) in model.captured_steps
        for parameter in model.parameters():
            parameter.mul_(0.9)
        with whole_texts():
            expected = model(ids, past_key_values=found.past_key_values)
        found = model(ids, past_key_values=found.past_key_values)
    # Float32 sums in another order, over 1,400 tokens.
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FIXED)
@torch.no_grad()
def test_steps_follow_forward_passes_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    model = model_of(MIXERS[name]).cuda().to(dtype)
    state = model(PROMPT.cuda()).past_key_values
    step = captured_step(model, 3)
    step.load(state)
    for token in range(20):
        ids = torch.tensor([token, 2 * token % 40, 39 - token], device="cuda")
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        error = float((step() - out.logits[:, -1]).float().norm() / out.logits[:, -1].float().norm())
        # Roundings to the weights' type happen at the same places; their ties may fall differently.
        assert error < {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for found, expected in zip(step.export().layers, state.layers, strict=True):
        for key in found:
            if key.endswith("recurrent"):
                assert float((found[key] - expected[key]).norm() / expected[key].norm()) < 3e-2


@torch.no_grad()
def test_a_bfloat16_state_stays_near() -> None:
    model = model_of(MIXERS["gated_delta_net"]).cuda()
    state = model(PROMPT.cuda()).past_key_values
    model.decoding.state_dtype = torch.bfloat16
    step = captured_step(model, 3)
    step.load(state)
    for token in range(20):
        ids = torch.full((3,), token, device="cuda")
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        logits = step()
    assert step.buffers[0]["recurrent"].dtype == torch.bfloat16
    # Twenty roundings of the state by 2 ** -9 each.
    assert float((logits - out.logits[:, -1]).norm() / out.logits[:, -1].norm()) < 5e-2


WIDE = {"type": "gated_delta_net", "num_heads": 2, "key_dim": 64, "value_dim": 64}
"""Wide enough for the kernels that take a whole layer, padding at the end included."""


@pytest.mark.parametrize("mixer", [MIXERS["gla_conv"], MIXERS["gated_delta_net"], MIXERS["mamba2"], WIDE], ids=str)
@torch.no_grad()
def test_a_captured_segment_equals_one_pass(mixer: dict[str, Any]) -> None:
    model = model_of(mixer).cuda()
    ids = torch.randint(0, 40, (2, 2 * SEGMENT + 77), device="cuda")
    whole = model(ids, logits_to_keep=1)
    logits, state = read_prompt(model, captured_segments(model, 2), ids, None)
    # float32 sums of thousands of tokens in another order; the 77 tokens that are left come eagerly at first.
    torch.testing.assert_close(logits, whole.logits[:, -1], rtol=1e-3, atol=1e-4)
    for found, expected in zip(state.layers, whole.past_key_values.layers, strict=True):
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-4)
    for length in (SEGMENT, 1500, 60):
        settings: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
        model.decoding.graphs = False
        expected_ids = model.generate(ids[:, :length], **settings)  # type: ignore
        model.decoding.graphs = True
        # A short prompt is read eagerly at first, then in segments that are captured for it, then in those.
        for _ in range(3):
            assert torch.equal(model.generate(ids[:, :length], **settings), expected_ids)  # type: ignore
    graphs = captured_segments(model, 2).graphs
    assert {kind[:2] for kind in graphs} == {(4096, False), (2048, True), (512, True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("gated_delta_net", {"chunk": 512, "top_k": 12, "blend": "input"}),
        ("mamba2", {"chunk": 64, "selector": "hard", "blend": "learned"}),
        ("gla_conv", {"chunk": 64, "top_k": 4}),
    ],
)
@torch.no_grad()
def test_captured_segments_with_retrieval_equal_one_pass(
    base: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = retrieval_model(base, **changes).cuda().to(dtype)
    ids = torch.randint(0, 40, (2, 2 * SEGMENT + 77), device="cuda")
    # A room that a longer prompt has filled; every length twice, so that the second time its rest is captured.
    for length in (SEGMENT, SEGMENT - 1, 50, 700, 2048, 700, 2 * SEGMENT + 77, 4800, 2 * SEGMENT, 4800):
        whole = model(ids[:, :length], logits_to_keep=1)
        found = read_captured(model, ids[:, :length], None)
        assert found is not None
        logits, state = found
        assert torch.equal(state.context, whole.past_key_values.context) and state.length == length
        pairs = [(logits, whole.logits[:, -1])]
        for mine, other in zip(state.layers, whole.past_key_values.layers, strict=True):
            assert mine.keys() == other.keys()
            pairs += [(mine[key], other[key]) for key in mine if mine[key].numel()]
        for mine, other in pairs:
            error = float((mine.float() - other.float()).norm() / other.float().norm())
            # With all chunks chosen sums in another order; else products within a rounding may choose other chunks.
            exact = dtype == torch.float32 and changes["chunk"] == 512
            assert error < (1e-3 if exact else 0.03 if dtype == torch.float32 else 0.15), (length, error)


@torch.no_grad()
def test_generate_with_retrieval_gives_the_same_tokens_from_captured_segments() -> None:
    model = retrieval_model("gla", chunk=512, top_k=12).cuda()
    ids = torch.randint(0, 40, (1, 4800), device="cuda")
    for length in (700, 2048, 4096, 4800):
        prompt = ids[:, :length]
        settings: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
        settings["attention_mask"] = torch.ones_like(prompt)
        model.decoding.graphs = False
        expected = model.generate(prompt, **settings)  # type: ignore
        model.decoding.graphs = True
        for _ in range(3):
            assert torch.equal(model.generate(prompt, **settings), expected)  # type: ignore
    assert ("segments", 1, 4096) in model.captured_steps and ("segments", 1, 8192) in model.captured_steps


def test_weights_that_moved_are_captured_again() -> None:
    model = model_of(MIXERS["gla"]).cuda()
    generate(model)
    changed = model_of(MIXERS["gla"], seed=9).cuda()
    for mine, other in zip(model.parameters(), changed.parameters(), strict=True):
        mine.data = other.data.clone()
    changed.decoding.graphs = False
    assert torch.equal(generate(model), generate(changed))


def test_weights_changed_in_place_are_seen() -> None:
    model = model_of(MIXERS["gla"]).cuda()
    before = generate(model)
    changed = model_of(MIXERS["gla"], seed=9).cuda()
    with torch.no_grad():
        for mine, other in zip(model.parameters(), changed.parameters(), strict=True):
            mine.copy_(other)
    changed.decoding.graphs = False
    after = generate(model)
    assert torch.equal(after, generate(changed)) and not torch.equal(after, before)


@pytest.mark.parametrize("name", LAYERS)
def test_attention_gives_the_same_tokens_as_without_a_graph(name: str) -> None:
    model = attention_model(name).cuda()
    model.decoding.graphs = False
    expected = generate(model)
    model.decoding.graphs = True
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model), expected)
    assert ("step", 3, None, 4096) in model.captured_steps


@torch.no_grad()
def test_autocast_is_recorded_by_itself_and_sees_changed_weights() -> None:
    model = model_of(MIXERS["gated_delta_net"]).cuda()
    for enabled in (True, False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            state = model(PROMPT.cuda()).past_key_values
            step = captured_step(model, 3)
            step.load(state)
            out = model(step.ids.zero_()[:, None], past_key_values=state).logits[:, 0].float()
            # Roundings to bfloat16 fall at other places; without autocast float32 sums have another order.
            assert float((step().float() - out).norm() / out.norm()) < (5e-2 if enabled else 1e-4)
        # What autocast kept of weights is gone, and something else may lie there; the weights are others.
        torch.full((1 << 22,), torch.nan, device="cuda")
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    assert list(model.captured_steps) == [("step", 3, None), ("step", 3, None, torch.bfloat16)]


LONGEST = 131072


def reserved() -> int:
    """Bytes that this process holds of the GPU and cannot give back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def limit(more: int) -> None:
    """Leave this process so many bytes beside those that it holds, which two allocations show."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved() + more) / total)
    torch.empty(more - (4 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(more + (4 << 20), dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def taken_by_step(model: RecurrentLM, rows: int) -> tuple[int, int]:
    """Bytes that the model's step for so many rows holds, and how many it takes at most while it is made."""
    model.captured_steps.clear()
    before = reserved()
    torch.cuda.reset_peak_memory_stats()
    captured_step(model, rows, LONGEST)
    most = torch.cuda.max_memory_reserved() - before
    return reserved() - before, most


def check_rooms_under_a_limit(_: int = 0) -> None:
    model = attention_model("full").cuda()
    prompt = PROMPT.cuda()[:1].repeat(4, 1)
    # Every token is an end, so that the plain path has one to write.
    settings: dict[str, Any] = {"max_new_tokens": LONGEST - 11, "eos_token_id": list(range(40)), "pad_token_id": 0}
    settings["attention_mask"] = torch.ones_like(prompt)
    expected = model.generate(prompt, **settings)  # type: ignore
    assert [key for key in model.captured_steps if key[0] == "step"] == [("step", 4, None, LONGEST)]
    # What libraries keep for good is taken now: more than four rows have other kernels, the plain path has its own.
    captured_step(model, 5, LONGEST)
    model.decoding.graphs = False
    assert torch.equal(model.generate(prompt, **settings), expected)  # type: ignore
    model.decoding.graphs = True
    five, most_of_five = taken_by_step(model, 5)
    four, _most = taken_by_step(model, 4)
    # The step of four rows is there. That of five has a place without it, not beside it.
    assert most_of_five < four + five
    limit((most_of_five + four + five) // 2 - four)
    assert captured_step(model, 5, LONGEST).room == LONGEST
    assert list(model.captured_steps) == [("step", 5, None, LONGEST)]
    model.captured_steps.clear()
    limit(four // 2)
    idle = torch.cuda.memory_allocated()
    with pytest.warns(UserWarning, match=f"without a CUDA graph.*room for {LONGEST} tokens.*smaller"):
        assert torch.equal(model.generate(prompt, **settings), expected)  # type: ignore
    gc.collect()
    # Nothing of the room is left: a row's keys alone take 8 MiB.
    assert not model.captured_steps and torch.cuda.memory_allocated() < idle + (8 << 20)


def test_rooms_that_memory_has_no_place_for() -> None:
    """In a process of its own: elsewhere other tests have memory that nobody can give back, or give some back."""
    torch.multiprocessing.spawn(check_rooms_under_a_limit, nprocs=1)  # type: ignore[no-untyped-call]


@torch.no_grad()
def test_another_thread_works_on_while_a_step_is_recorded() -> None:
    model, other = model_of(MIXERS["gated_delta_net"]).cuda(), model_of(MIXERS["mamba2"]).cuda()
    expected, ended, errors = generate(model), threading.Event(), []
    other.decoding.graphs = False

    def work() -> None:
        held, ids = [], PROMPT.cuda()
        try:
            while not ended.is_set():
                # New memory each time, as what others have given back would do.
                held.append(torch.zeros(len(held) % 64 + 1, 1 << 20, device="cuda"))
                del held[: len(held) // 8]
                float(other(ids).logits.detach().sum())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            model.captured_steps.clear()
            assert torch.equal(generate(model), expected)
            assert ("step", 3, None) in model.captured_steps
    finally:
        ended.set()
        thread.join()
    assert not errors
