"""The decoding step of models with retrieval: a context with room, against the model's own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longrecall.inference import generation
from longrecall.inference.eligibility import why_no_step, why_not_fixed
from longrecall.inference.step import DecodingStep
from longrecall.layers.retrieval import step as retrieval_step
from longrecall.layers.retrieval.step import RetrievalStep
from longrecall.layers.tokens import TokenContext
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

CHUNK = MIXERS["retrieval"]["chunk"]


def model_of(base: str, **changes: Any) -> RecurrentLM:
    torch.manual_seed(0)
    mixers = [MIXERS["retrieval"] | {"base": MIXERS[base]} | changes, MIXERS["gla"]]
    layers = [{"mixer": mixer, "mlp_size": 24} for mixer in mixers]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def prompts(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    g = torch.Generator().manual_seed(4)
    mask = (torch.arange(length) >= torch.arange(rows)[:, None] % length).long()
    return torch.randint(0, 40, (rows, length), generator=g), mask


@pytest.mark.parametrize(
    ("base", "rows", "fused", "selector", "blend"),
    [
        ("gla_conv", 3, False, "weighted", "input"),
        ("rwkv5", 2, False, "hard", "learned"),
        ("mamba2", 1, True, "weighted", "input"),
        ("rwkv5", 1, True, "hard", "learned"),
        ("gla", 5, True, "weighted", "fixed"),
        ("gated_delta_net", 2, True, "hard", "fixed"),
    ],
)
@torch.no_grad()
def test_steps_equal_forward_passes(base: str, rows: int, fused: bool, selector: str, blend: str) -> None:
    """From before the first chunk's end until past the second's; fused steps run in Triton's interpreter here."""
    model = model_of(base, selector=selector, blend=blend)
    ids, mask = prompts(rows, CHUNK - 2)
    state = model(ids, attention_mask=mask).past_key_values
    step = DecodingStep(model, rows, fused=fused, room=CHUNK * 4 + 1)
    step.load(state)
    for token in range(CHUNK + 3):
        ids = (7 * token + 3 * torch.arange(rows)) % 40
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        # float32 sums in another order, through two layers.
        torch.testing.assert_close(step(), out.logits[:, -1], rtol=1e-4, atol=1e-5)
    kept = step.export()
    assert kept.length == state.length and torch.equal(kept.position, state.position)
    assert torch.equal(kept.context, state.context)
    for found, expected in zip(kept.layers, state.layers, strict=True):
        assert found.keys() == expected.keys()
        for key in found:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_step_forgets_the_longer_context_before() -> None:
    model = model_of("gla")
    (ids, mask), (longer, _) = prompts(3, CHUNK + 1), prompts(3, 4 * CHUNK)
    short, long = model(ids, attention_mask=mask).past_key_values, model(longer).past_key_values
    used, fresh = (DecodingStep(model, 3, room=6 * CHUNK) for _ in range(2))
    used.load(long)
    used()
    for step in (used, fresh):
        step.load(short)
    for _ in range(CHUNK):
        assert torch.equal(used(), fresh())
    assert torch.equal(used.export().context, fresh.export().context)


@torch.no_grad()
def test_room_is_needed_and_ends() -> None:
    model = model_of("gla")
    state = model(prompts(1, CHUNK)[0]).past_key_values
    with pytest.raises(ValueError, match="needs room for its context; got none"):
        DecodingStep(model, 1)
    with pytest.raises(ValueError, match="context has 5 tokens, the step room for 4"):
        DecodingStep(model, 1, room=CHUNK - 1).load(state)
    step = DecodingStep(model, 1, room=CHUNK + 1)
    step.load(state)
    step()
    with pytest.raises(ValueError, match="room for 6 tokens of context, all of them read"):
        step()


def test_what_can_be_captured() -> None:
    model = model_of("gla")
    assert why_no_step(model) is None
    # Its prompts need room besides (test_retrieval_prefill.py).
    assert "retrieval" in str(why_not_fixed(model))
    assert why_no_step(model_of("attention")) is None
    assert "layer 0 (retrieval): hyena keeps a cache" in str(why_no_step(model_of("hyena")))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "eos_token_id": [3, 8]}])
def test_generate_gives_the_same_tokens(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() through the step, which runs eagerly without a GPU."""
    model = model_of("gla_conv")
    made: list[int] = []

    def eager(model: RecurrentLM, batch: int, room: int, where: Any) -> DecodingStep:
        made.append(room)
        return DecodingStep(model, batch, room=room)

    def generate() -> torch.Tensor:
        torch.manual_seed(3)
        ids, mask = prompts(2, 7)
        settings = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None} | options
        return model.generate(ids, attention_mask=mask, **settings)  # type: ignore

    expected = generate()
    monkeypatch.setattr(generation, "captured_step", eager)
    monkeypatch.setattr(generation, "why_no_graph", why_no_step)
    assert not made
    assert torch.equal(generate(), expected)
    assert made == [27]


@torch.no_grad()
def test_keys_and_values_are_those_of_the_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed in blocks of ids, and anew at every load: writes through `.data` leave no trace."""
    pytest.importorskip("triton")
    monkeypatch.setattr(retrieval_step, "ID_BLOCK", 24)
    retrieval = MIXERS["retrieval"] | {"base": MIXERS["gla"]}
    layers = [{"mixer": retrieval | changes} for changes in ({}, {"num_heads": 4, "kv_heads": 2, "head_dim": 6})]
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()
    state = model(prompts(1, 3)[0]).past_key_values
    step = DecodingStep(model, 1, fused=True, room=9)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    step.load(state)
    embedded = TokenContext.read(None, torch.arange(40)[None], None, model.model.embeddings).embedded
    for own in (layer.blocks[0].step for layer in step.steps):
        assert isinstance(own, RetrievalStep) and own.memory is not None
        for place, proj in enumerate((own.mixer.k_proj, own.mixer.v_proj)):
            expected = proj(embedded)[0].unflatten(-1, own.memory.shape[2:])
            # The same products, beside others: sums of 32 terms in float32.
            torch.testing.assert_close(own.memory[:, place], expected, rtol=1e-5, atol=1e-5)
