"""Memory tokens before every text, keys that layers share, branches without projections, retrieval in their place.

Hymba as published has them all: tests/models/naive/hymba.py compares whole models. Here is what it cannot show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.inference.eligibility import why_no_room
from longrecall.inference.step import DecodingStep
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.segments import Segments, read_batch
from tests.training.interventions import intervene

D, VOCABULARY, MEMORY = 20, 61, 3
SSM = {"type": "mamba", "inner_dim": 40, "state_dim": 3, "dt_rank": 4, "out_proj": False}
ATTENTION = {"type": "attention", "num_heads": 5, "kv_heads": 1, "head_dim": 4, "value_dim": 8, "out_proj": False} | {
    "memory_tokens": MEMORY,
    "window": 4,
}
RETRIEVAL = {"type": "retrieval", "chunk": 3, "top_k": 2, "encoder_dim": 6, "num_heads": 2, "head_dim": 5} | {
    "output_dim": 40
}


def hymba(attention: dict[str, Any]) -> dict[str, Any]:
    return {"mixer": {"type": "hymba", "attention": attention, "ssm": SSM}, "mlp_size": 24}


PLAIN = {"type": "attention", "num_heads": 2, "head_dim": 10, "memory_tokens": MEMORY}
MODELS: dict[str, list[dict[str, Any]]] = {
    "hymba": [hymba(ATTENTION), hymba(ATTENTION | {"shared_keys": "give"}), hymba(ATTENTION | {"shared_keys": "take"})],
    # RESONA, table 4: in some layers retrieval stands in the place of the attention branch.
    "retrieval": [hymba(ATTENTION), hymba(RETRIEVAL), hymba(RETRIEVAL | {"selector": "hard"})],
    "outside_of_hymba": [
        {"mixer": PLAIN | {"shared_keys": "give", "qk_norm": "head", "output_gate": True}, "mlp_size": 0},
        {"mixer": PLAIN | {"shared_keys": "take", "qk_norm": "full", "output_gate": True}, "mlp_size": 24},
        {"mixer": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 6, "conv_width": 4}, "mlp_size": 0},
    ],
}
EVERY = pytest.mark.parametrize("name", MODELS)


def build(name: str, **more: Any) -> RecurrentLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": D, "memory_tokens": MEMORY}
    model = RecurrentLM(RecurrentConfig(**sizes | {"layers": MODELS[name]} | more)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ids(length: int = 17, rows: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


@EVERY
@torch.no_grad()
def test_segments_steps_padding_and_packed_documents(name: str) -> None:
    model, tokens = build(name), ids()
    whole = model(tokens).logits
    first = model(tokens[:, :8])
    rest = model(tokens[:, 8:], past_key_values=first.past_key_values).logits
    # float64 throughout, the same sums in another order.
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-9, atol=1e-9)
    padded = torch.nn.functional.pad(tokens, (4, 0), value=7)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (4, 0))
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], whole, rtol=1e-9, atol=1e-9)
    packed = model(tokens.reshape(1, -1), cu_seqlens=torch.tensor([0, 17, 34])).logits
    torch.testing.assert_close(packed.view_as(whole), whole, rtol=1e-9, atol=1e-9)
    # From the first token on, without a state to begin with.
    step = DecodingStep(model, 2, torch.float64, fused=False, room=20)
    for t in range(17):
        step.ids.copy_(tokens[:, t])
        torch.testing.assert_close(step(), whole[:, t], rtol=1e-9, atol=1e-9)
    after = model(tokens, past_key_values=step.export()).logits
    again = model(tokens, past_key_values=model(tokens).past_key_values).logits
    # Steps hand out recurrent states in float32.
    torch.testing.assert_close(after, again, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_steps_beside_kernels() -> None:
    """Where other layers run in kernels, attention of this kind runs in plain torch."""
    model, tokens = build("hymba").float(), ids(5)
    expected, step = model(tokens).logits, DecodingStep(model, 2, fused=True, room=8)
    for t in range(5):
        step.ids.copy_(tokens[:, t])
        # float32; the logits are of size 1 to 5.
        torch.testing.assert_close(step(), expected[:, t], rtol=1e-4, atol=1e-4)


@EVERY
def test_every_parameter_learns_with_checkpointing_too(name: str) -> None:
    model, tokens = build(name).train(), ids()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        assert loss is not None
        loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert {n for n, _ in model.named_parameters()} - found[0].keys() == frozen
    for key, gradient in found[0].items():
        assert bool(gradient.any()), key
        # float64, the same sums.
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-9, atol=1e-12)


@EVERY
@torch.no_grad()
def test_descriptions_tensors_states_and_generation(name: str, tmp_path: Path) -> None:
    model, tokens = build(name), ids(9)
    shapes = [(key, tuple(tensor.shape)) for key, tensor in model.state_dict().items() if key != "lm_head.weight"]
    assert list(model.config.tensor_shapes().items()) == shapes
    for layer in model.config.layers:
        assert mixer_config(layer["mixer"]).to_dict() == layer["mixer"]
    zero, state = model.zero_state(2), model(tokens).past_key_values
    assert zero.length == 0 and zero.position.tolist() == [0, 0] and state.position.tolist() == [9, 9]
    expected = model(tokens).logits
    assert torch.equal(model(tokens, past_key_values=zero).logits, expected)
    state.save(tmp_path / "state", model.fingerprint())
    loaded = RecurrentState.load(tmp_path / "state", model)
    assert torch.equal(model(tokens, past_key_values=loaded).logits, model(tokens, past_key_values=state).logits)
    found, text = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0), tokens
    for _ in range(4):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, text)
    assert "memory tokens" in str(why_no_room(model, 4096))


@torch.no_grad()
def test_documents_beside_a_row_that_goes_on_begin_with_the_memory_tokens() -> None:
    model, tokens = build("hymba"), ids(12)
    initial = intervene("state_passing", model, attention_window=5, probability=1.0)
    read_batch(model, tokens, tokens, torch.tensor([True, True]), initial)
    state, segments = initial.before_batch(torch.tensor([True, True])), Segments.of([[5], []], 12)
    assert state is not None
    spread = segments.spread(state, initial.continues, model.zero_state)
    logits = model(**segments.inputs(tokens, tokens), past_key_values=spread).logits.view(2, 12, -1)
    # float64, the same sums in another order; states are passed on in float64 too.
    torch.testing.assert_close(logits[0, 5:], model(tokens[:1, 5:]).logits[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits[1], model(tokens, past_key_values=state).logits[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(logits[1], model(tokens).logits[1], atol=1e-3)


@torch.no_grad()
def test_memory_tokens_are_what_a_text_reads_before_its_first_word() -> None:
    """With full attention they are like words of the text, but for where they come from."""
    layers = [hymba(ATTENTION | {"window": None}), hymba(ATTENTION | {"window": None})]
    model, tokens = build("hymba", layers=layers), ids(6)
    plain = [hymba({k: v for k, v in ATTENTION.items() if k not in ("window", "memory_tokens")})] * 2
    other = build("hymba", layers=plain, memory_tokens=0)
    tensors = model.state_dict()
    memory = tensors.pop("model.memory_tokens")
    other.load_state_dict(tensors)
    embedded = torch.cat([memory.expand(2, -1, -1), other.model.embeddings(tokens)], 1)
    expected = other(inputs_embeds=embedded).logits[:, MEMORY:]
    # float64, the same sums in another order.
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_retrieval_alone_is_retrieval_with_all_weight_on_it() -> None:
    """Where a chunk has ended it is what a layer around any mixer returns with alpha 0; before that, zeros."""
    sizes = {key: value for key, value in RETRIEVAL.items() if key != "output_dim"}
    base = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 6}
    models = []
    for mixer in (sizes, sizes | {"base": base, "alpha": 0.0}):
        torch.manual_seed(0)
        config = RecurrentConfig(vocab_size=VOCABULARY, hidden_size=D, layers=[{"mixer": mixer, "mlp_size": 0}])
        models.append(RecurrentLM(config).double().eval())
    alone, around = models
    around.load_state_dict(alone.state_dict(), strict=False)
    tokens, outputs = ids(), []
    for model in models:
        kept: list[Tensor] = []
        model.model.layers[0].mixer.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[0]))
        model(tokens)
        outputs.append(kept[0])
    torch.testing.assert_close(outputs[0][:, 3:], outputs[1][:, 3:], rtol=1e-12, atol=1e-12)
    assert bool((outputs[0][:, :3] == 0).all()) and bool((outputs[0][:, 3:] != 0).any(-1).all())


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("attention.*memory_tokens 0 is in a model with 3", {"layers": [{"mixer": PLAIN | {"memory_tokens": 0}}]}),
    ("attention.*memory_tokens 3 is in a model with 0", {"layers": [{"mixer": PLAIN}], "memory_tokens": 0}),
    ('"mla" with memory_tokens 0', {"layers": [{"mixer": {"type": "mla", "num_heads": 2, "kv_rank": 4} | {
        "nope_dim": 4, "rope_dim": 4, "value_dim": 4}}]}),
    ("without out_proj is for a branch of hymba", {"layers": [{"mixer": ATTENTION}]}),
    ('attention of "parallel" needs its out_proj', {"layers": [{"mixer": {
        "type": "parallel", "attention": ATTENTION, "ssm": SSM | {"out_proj": True}}}]}),
    (r"different numbers of channels \(attention 40, ssm 20\)", {"layers": [hymba(ATTENTION) | {"mixer": {
        "type": "hymba", "attention": ATTENTION, "ssm": SSM | {"out_proj": True}}}]}),
    ("shared_keys must be give, take or null", {"layers": [{"mixer": PLAIN | {"shared_keys": "both"}}]}),
    ("meta_tokens do not go with", {"layers": [{"mixer": PLAIN | {"meta_tokens": 2}}]}),
    ('rope_type "dynamic" do not know', {"layers": [{"mixer": PLAIN | {"rope_scaling": {
        "rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 8}}}]}),
    ("blend must be fixed", {"layers": [{"mixer": RETRIEVAL | {"blend": "input"}}]}),
    ("output_dim is for retrieval without a base", {"layers": [{"mixer": RETRIEVAL | {"base": PLAIN}}]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "changed"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_what_does_not_fit_is_refused(message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=message):
        build("hymba", **changed)


def test_who_takes_keys_needs_somebody_who_gives_them() -> None:
    layers = [{"mixer": PLAIN | {"shared_keys": "take"}, "mlp_size": 0}]
    with pytest.raises(UserError, match="no layer before it gives any"):
        build("hymba", layers=layers)(ids())
