"""Reading prompts in segments with retrieval layers: the same as one pass. On a CPU the segments run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.inference import generation
from longrecall.inference.eligibility import why_no_room, why_no_step
from longrecall.inference.reading import MOST_ROWS, captured_segments, read_captured, read_prompt
from longrecall.inference.segments import EAGER_FIRST, CapturedSegments, Kind
from longrecall.inference.step import DecodingStep
from longrecall.layers.retrieval import fused
from longrecall.layers.retrieval.prompt_memory import PromptMemory
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import fixed_shapes
from tests.inference.test_decoding import NoValues
from tests.inference.test_decoding_retrieval import CHUNK, model_of

launch = pytest.importorskip("longrecall.ops.kernels.launch")

LONG, SHORT = 6 * CHUNK, 2 * CHUNK
ROOM = 4 * LONG


def segments_of(model: RecurrentLM, rows: int) -> CapturedSegments:
    """Segments that read rests from the first prompt on."""
    segments = CapturedSegments(model, rows, (SHORT, 2 * SHORT, LONG), ROOM)
    segments.rests = EAGER_FIRST
    return segments


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def same(found: RecurrentState, expected: RecurrentState) -> None:
    assert (found.length, found.context.dtype) == (expected.length, torch.int32)  # type: ignore[union-attr]
    assert torch.equal(found.position, expected.position) and torch.equal(found.context, expected.context)  # type: ignore
    for mine, other in zip(found.layers, expected.layers, strict=True):
        assert mine.keys() == other.keys()
        for key in mine:
            # float32 sums in another order, through two layers.
            torch.testing.assert_close(mine[key], other[key], rtol=1e-4, atol=1e-5)


LENGTHS = [1, CHUNK - 1, CHUNK, SHORT - 1, SHORT, SHORT + 1, LONG, LONG + CHUNK + 2, 2 * LONG + SHORT + 3, ROOM]


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_segments_equal_one_pass(length: int) -> None:
    """With rests, without; ends at the border of a chunk and beside it. Decoding then goes on as from the other."""
    model, ids = model_of("gla_conv"), text(2, length)
    segments = segments_of(model, 2)
    # What a longer prompt left behind is never looked up.
    read_prompt(model, segments, text(2, ROOM, 1), None)
    logits, state = read_prompt(model, segments, ids, None)
    expected = model(ids)
    torch.testing.assert_close(logits, expected.logits[:, -1], rtol=1e-4, atol=1e-5)
    same(state, expected.past_key_values)
    step = DecodingStep(model, 2, room=ROOM + 2 * CHUNK)
    step.load(state)
    after = expected.past_key_values
    for token in range(CHUNK + 1):
        out = model(text(2, 1, token), past_key_values=after)
        after = out.past_key_values
        step.ids.copy_(text(2, 1, token)[:, 0])
        torch.testing.assert_close(step(), out.logits[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("mamba2", {"selector": "hard", "blend": "learned"}),
        ("gated_delta_net", {"blend": "input", "top_k": 1}),
        ("rwkv5", {"blend": "fixed", "top_k": 30, "kv_heads": 2, "num_heads": 4}),
    ],
)
@torch.no_grad()
def test_every_kind_of_layer(base: str, changes: dict[str, Any]) -> None:
    """More chunks are asked for than the room holds in the last case."""
    model, ids = model_of(base, **changes), text(1, LONG + SHORT + 3)
    logits, state = read_prompt(model, segments_of(model, 1), ids, None)
    expected = model(ids)
    torch.testing.assert_close(logits, expected.logits[:, -1], rtol=1e-4, atol=1e-5)
    same(state, expected.past_key_values)


@torch.no_grad()
def test_a_returned_state_is_a_copy() -> None:
    model = model_of("gla")
    segments = segments_of(model, 1)
    _, state = read_prompt(model, segments, text(1, LONG), None)
    kept = [{name: tensor.clone() for name, tensor in layer.items()} for layer in state.layers]
    read_prompt(model, segments, text(1, LONG + 7, 3), None)
    for layer, copies in zip(state.layers, kept, strict=True):
        assert all(torch.equal(layer[name], copies[name]) for name in copies)


def test_segments_made_in_inference_mode_serve_outside_of_it() -> None:
    model = model_of("gla")
    with torch.inference_mode():
        segments = segments_of(model, 2)
        expected, _ = read_prompt(model, segments, text(2, 40), None)
    with torch.no_grad():
        found, _ = read_prompt(model, segments, text(2, 40), None)
    assert torch.equal(found, expected)


@torch.no_grad()
def test_a_rest_is_read_eagerly_at_first() -> None:
    model, ids = model_of("gla"), text(1, LONG + 3)
    segments = CapturedSegments(model, 1, (SHORT, 2 * SHORT, LONG), ROOM)
    expected = model(ids)
    for _ in range(EAGER_FIRST + 1):
        logits, state = read_prompt(model, segments, ids, None)
        torch.testing.assert_close(logits, expected.logits[:, -1], rtol=1e-4, atol=1e-5)
        same(state, expected.past_key_values)


@pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("blend", ["input", "fixed"])
@torch.no_grad()
def test_in_kernels_as_in_plain_torch(blend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels begin at a position that only the device knows."""
    model, ids = model_of("gla", blend=blend, num_heads=4, kv_heads=2), text(2, LONG + SHORT + 3)
    expected, state = read_prompt(model, segments_of(model, 2), ids, None)
    monkeypatch.setattr(fused, "why_not", lambda *_: None)
    found, after = read_prompt(model, segments_of(model, 2), ids, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    same(after, state)


@pytest.mark.parametrize("selector", ["weighted", "hard"])
def test_segments_never_wait_for_values(selector: str) -> None:
    segments = segments_of(model_of("gla_conv", selector=selector), 2)
    with fixed_shapes(), NoValues():
        for kind in (Kind(LONG, False), Kind(SHORT, False), Kind(SHORT, True)):
            segments._run(kind)


def test_a_run_past_the_room_stays_inside() -> None:
    """As the eager run before a recording may begin where the last prompt ended."""
    segments = segments_of(model_of("gla"), 1)
    segments.state.position.fill_(ROOM - 1)
    segments._run(Kind(LONG, False))
    assert segments.logits.isfinite().all()


@torch.no_grad()
def test_what_does_not_fit() -> None:
    model = model_of("gla")
    segments = segments_of(model, 1)
    with pytest.raises(ValueError, match=f"prompt has {ROOM + 1} tokens, the segments room for {ROOM}"):
        read_prompt(model, segments, text(1, ROOM + 1), None)
    state = model(text(1, 3)).past_key_values
    with pytest.raises(ValueError, match="begin with the first token"):
        read_prompt(model, segments, text(1, LONG), state)
    room = PromptMemory([model.model.layers[0].mixer], 1, ROOM)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=f"of {CHUNK + 1} tokens is not filled by chunks of {CHUNK}"):
        room.segment(text(1, CHUNK + 1), torch.zeros(1, dtype=torch.long), model.model.embeddings)


def test_which_prompts_are_read_in_segments() -> None:
    assert why_no_room(model_of("gla", chunk=8), 100) is None
    assert "chunks of 5 tokens do not fill" in str(why_no_room(model_of("gla"), 100))
    assert "room for 131072 tokens" in str(why_no_room(model_of("gla", chunk=8), 131073))
    assert why_no_room(model_of("attention", chunk=8), 100) is None
    assert "base_conv" in str(why_no_room(model_of("base_conv_implicit", chunk=8), 100))
    model = model_of("gla", chunk=8)
    assert read_captured(model, text(MOST_ROWS + 1, 3), None) is None
    assert read_captured(model_of("gla"), text(1, 3), None) is None
    # One memory for all prompts up to a power of two.
    assert captured_segments(model, 1, 9) is captured_segments(model, 1, 4096)
    assert captured_segments(model, 1, 4097) is not captured_segments(model, 1, 4096)
    assert captured_segments(model, 1, 4097).memory.capacity == 8192  # type: ignore[union-attr]


def test_generate_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts without padding through segments, three times: eagerly, in a rest, in that rest again."""
    model, ids = model_of("gla_conv", chunk=8), text(2, 19)
    settings: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **settings)  # type: ignore[operator]
    seen: list[int] = []

    def reading(self: PromptMemory, *arguments: Any, own: Any = PromptMemory.segment) -> Any:
        seen.append(1)
        return own(self, *arguments)

    monkeypatch.setattr(PromptMemory, "segment", reading)
    monkeypatch.setattr(generation, "why_no_graph", why_no_step)
    monkeypatch.setattr(DecodingStep, "capture", lambda self: None)
    for count in (0, 1, 2):
        assert torch.equal(model.generate(ids, **settings), expected)  # type: ignore[operator]
        assert len(seen) == count
