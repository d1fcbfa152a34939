"""The decoding step of models with softmax attention: a cache with room, against the model's own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longrecall.inference import generation, reading
from longrecall.inference import step as step_module
from longrecall.inference.eligibility import room_for, why_no_room, why_no_step
from longrecall.inference.step import DecodingStep
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS
from tests.inference.test_decoding import assert_exports

FULL = {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8, "qkv_bias": True}
WINDOW = {"type": "attention", "num_heads": 2, "head_dim": 6, "window": 5, "rope_theta": 100.0}
META = WINDOW | {"meta_tokens": 3}
GATED = FULL | {"rotary_share": 0.5, "qk_norm": "head", "qk_norm_offset": 1.0, "output_gate": True}
WHOLE = WINDOW | {"rotary_share": 0.0, "qk_norm": "full", "output_gate": True, "out_bias": True, "soft_cap": 1.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
STRETCHED = META | {"rope_scaling": YARN, "scale": 0.6, "key_multiplier": 1.2, "soft_cap": 2.0}
LATENT = {"type": "mla", "num_heads": 3, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL, MIXERS["gla"]],
    "window": [WINDOW, FULL],
    "meta": [META, FULL | {"meta_tokens": 2}],
    "options": [GATED, WHOLE, STRETCHED],
    "latent": [LATENT, LATENT | {"rotary": False, "q_rank": 10, "bias": True}],
    "hymba": [{"type": "hymba", "attention": META, "ssm": MIXERS["mamba2"], "third": FULL}, WINDOW],
    "parallel": [MIXERS["parallel"] | {"attention": META}, MIXERS["parallel"] | {"ssm": FULL, "attention": WINDOW}],
    "retrieval": [MIXERS["retrieval"] | {"base": FULL}, MIXERS["retrieval"] | {"base": WINDOW}],
}


def model_of(name: str) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": mixer} for mixer in LAYERS[name]]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def prompts(rows: int, length: int, padded: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded on one side."""
    g = torch.Generator().manual_seed(4)
    mask = (torch.arange(length) >= 2 * torch.arange(rows)[:, None] % length).long()
    mask = mask.flip(1) if padded == "right" else torch.ones_like(mask) if padded == "none" else mask
    return torch.randint(0, 40, (rows, length), generator=g), mask


@pytest.mark.parametrize(
    ("name", "rows", "length", "padded", "tokens", "fused"),
    [
        *[(name, 2, 9, "left", 13, False) for name in LAYERS],
        # Shorter than the window: nothing is cut off, and padding lies between the tokens of a row.
        ("window", 3, 4, "right", 13, False),
        ("meta", 4, 4, "right", 13, False),
        ("full", 2, 9, "none", 2, True),
        ("meta", 5, 4, "right", 7, True),
        ("hymba", 1, 9, "none", 3, True),
        ("parallel", 1, 9, "none", 3, True),
        ("parallel", 5, 4, "right", 2, True),
        ("options", 2, 9, "left", 5, True),
        ("options", 5, 4, "right", 3, True),
        ("latent", 2, 9, "left", 3, True),
        ("retrieval", 1, 9, "none", 6, True),
    ],
)
@torch.no_grad()
def test_steps_equal_forward_passes(name: str, rows: int, length: int, padded: str, tokens: int, fused: bool) -> None:
    """Past the end of a window's columns; fused steps run in Triton's interpreter here."""
    if fused:
        pytest.importorskip("triton")
    model = model_of(name)
    ids, mask = prompts(rows, length, padded)
    state = model(ids, attention_mask=mask).past_key_values
    step = DecodingStep(model, rows, fused=fused, room=length + tokens)
    step.load(state)
    for token in range(tokens):
        ids = (7 * token + 3 * torch.arange(rows)) % 40
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        # float32 sums in another order, through two layers.
        torch.testing.assert_close(step(), out.logits[:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=f"room for {length + tokens} tokens"):
        step()
    assert_exports(step, state)


@pytest.mark.parametrize("name", ["full", "hymba"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "eos_token_id": [3, 8]}])
def test_generate_gives_the_same_tokens(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() through the step, which runs eagerly without a GPU; the prompt is read in one pass."""
    model = model_of(name)
    made: list[int] = []

    def eager(model: RecurrentLM, batch: int, room: int, where: Any) -> DecodingStep:
        made.append(room)
        return DecodingStep(model, batch, room=room)

    def generate() -> torch.Tensor:
        torch.manual_seed(3)
        ids, mask = prompts(2, 7, "left")
        settings = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None} | options
        return model.generate(ids, attention_mask=mask, **settings)  # type: ignore

    expected = generate()
    monkeypatch.setattr(generation, "captured_step", eager)
    monkeypatch.setattr(generation, "why_no_graph", why_no_step)
    assert torch.equal(generate(), expected)
    assert made == [27]


@torch.no_grad()
def test_a_step_forgets_the_longer_context_before() -> None:
    model = model_of("hymba")
    short, long = (model(prompts(2, length, "none")[0]).past_key_values for length in (6, 20))
    used, fresh = (DecodingStep(model, 2, room=30) for _ in range(2))
    used.load(long)
    for _ in range(9):
        used()
    for step in (used, fresh):
        step.load(short)
    for _ in range(8):
        assert torch.equal(used(), fresh())


@torch.no_grad()
def test_room_is_needed() -> None:
    model = model_of("full")
    state = model(prompts(1, 9, "none")[0]).past_key_values
    assert room_for(model, state, 5) == 14
    with pytest.raises(ValueError, match="needs room for its context; got none"):
        DecodingStep(model, 1)
    with pytest.raises(ValueError, match="cache has 9 columns, the step room for 8"):
        DecodingStep(model, 1, room=8).load(state)


@torch.no_grad()
def test_a_room_below_twice_the_window_ends() -> None:
    # Its columns would be used again while rows still see what is in them.
    torch.manual_seed(0)
    layers = [{"mixer": WINDOW | {"window": 8}}]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()
    for room, steps in ((10, 3), (16, 16)):
        ids, mask = prompts(3, 7, "right")
        state = model(ids, attention_mask=mask).past_key_values
        step = DecodingStep(model, 3, fused=False, room=room)
        step.load(state)
        for token in range(steps):
            step.ids.fill_(token)
            out = model(step.ids[:, None], past_key_values=state)
            state = out.past_key_values
            # float32 sums in another order.
            torch.testing.assert_close(step(), out.logits[:, 0], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=f"has room for {room} tokens"):
            step()


@pytest.mark.parametrize("name", ["full", "retrieval"])
@torch.no_grad()
def test_recording_leaves_a_step_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replayed:
        def __init__(self, work: Any, warmups: int, stream: Any) -> None:
            self.replay = work
            for _ in range(warmups):
                work()

    monkeypatch.setattr(step_module, "record", Replayed)
    monkeypatch.setattr(step_module, "recording_stream", lambda device: None)
    model = model_of(name)
    recorded, fresh = (DecodingStep(model, 2, room=30) for _ in range(2))
    recorded.capture()
    for token in range(20):
        for step in (recorded, fresh):
            step.ids.fill_(token)
        assert torch.equal(recorded(), fresh())
    assert torch.equal(recorded.export().position, fresh.export().position)


@pytest.mark.parametrize("name", ["full", "meta", "retrieval"])
def test_a_step_made_in_inference_mode_serves_outside_of_it(name: str) -> None:
    model, (ids, _) = model_of(name), prompts(2, 9, "none")
    steps = []
    with torch.inference_mode():
        steps.append(DecodingStep(model, 2, room=30))
        steps[0].load(model(ids).past_key_values)
        steps[0]()
    with torch.no_grad():
        steps.append(DecodingStep(model, 2, room=30))
        state = model(ids).past_key_values
        for step in steps:
            step.load(state)
        assert torch.equal(steps[0](), steps[1]())


def test_prompts_may_be_read_in_segments() -> None:
    assert why_no_room(model_of("full"), 100) is None and why_no_room(model_of("hymba"), 100) is None


@pytest.mark.parametrize(
    ("tokens", "room"), [(1, 4096), (4097, 8192), (32768, 32768), (131200, 163840), (500000, 524288)]
)
def test_rooms_have_few_sizes(tokens: int, room: int) -> None:
    assert reading.rounded_room(tokens) == room
