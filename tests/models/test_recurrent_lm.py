"""RecurrentLM with every mixer: states as values, padding, packing, generation, precision, saving."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from longrecall.errors import UserError
from longrecall.models.config import RecurrentConfig
from longrecall.models.losses import next_token_loss
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import states_are_unread, unread_states
from tests.conftest import MIXERS, RECURRENT

# fp32 logits of magnitude 1 to 5 after four layers in another order of sums; the promise to users is 1e-4.
TOLERANCE = 1e-4
ALL = [*MIXERS, "mixed"]
TWINS = (
    *("gla_merged", "gla_subheads", "retnet_merged", "hgrn2_conv", "mamba2_groups", "base_conv_wide", "mom_linear"),
    *("delta_net_grafted", "gated_delta_net_subheads", "kda_subheads"),
)
"""Mixers whose states have the tensors that another one's have, with other sizes."""
STATES = [pytest.param(name, marks=[pytest.mark.slow] * (name in TWINS)) for name in ALL]
"""Generation sees the state of a mixer alone; twins, whose steps other tests compare, generate with `-m slow`."""


def build(name: str, depth: int = 2, **changes: Any) -> RecurrentLM:
    torch.manual_seed(0)
    names = list(MIXERS) if name == "mixed" else [name] * depth
    layers = [{"mixer": MIXERS[n], "mlp_size": 48 if i % 2 else 0} for i, n in enumerate(names)]
    settings_ = {"hidden_size": 32, "eos_token_id": 256, "pad_token_id": 257, "initializer_range": 0.2} | changes
    model = RecurrentLM(RecurrentConfig(layers=layers, **settings_)).eval()
    # One layer of every mixer: dozens in a row blow float32's roundings up, so there only the arithmetic is compared.
    return model.double() if name == "mixed" else model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ALL)
def test_segments_and_single_steps_equal_one_forward(name: str) -> None:
    model, x = build(name), tokens(2, 75)
    with torch.no_grad():
        full = model(x).logits
        state, pieces = model.zero_state(2), []
        for start, stop in ((0, 3), (3, 40), *((i, i + 1) for i in range(40, 48)), (48, 75)):
            out = model(x[:, start:stop], past_key_values=state)
            state = out.past_key_values
            pieces.append(out.logits)
    assert (torch.cat(pieces, 1) - full).abs().max() < TOLERANCE
    assert state.position.tolist() == [75, 75] and state.length == 75


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(ALL), cut=st.integers(1, 66))
def test_decoding_from_any_split_point(name: str, cut: int) -> None:
    model, x = build(name), tokens(1, 67)
    with torch.no_grad():
        full = model(x).logits
        out = model(x[:, :cut])
        for t in range(cut, 67):
            out = model(x[:, t : t + 1], past_key_values=out.past_key_values)
            assert (out.logits[:, 0] - full[:, t]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_padding_leaves_logits_and_state_untouched(name: str) -> None:
    model, x = build(name), tokens(2, 40)
    rows = torch.full((2, 52), 257)
    mask = torch.zeros_like(rows)
    rows[0, 12:], mask[0, 12:] = x[0], 1
    rows[1, 5:15], mask[1, 5:15] = x[1, :10], 1
    rows[1, 20:30], mask[1, 20:30] = x[1, 10:20], 1
    with torch.no_grad():
        out = model(rows, attention_mask=mask)
        plain, short = model(x[:1]).logits[0], model(x[1:, :20]).logits[0]
        after = model(x[:, 20:30], past_key_values=out.past_key_values).logits[1]
        expected_after = model(x[1:, :30]).logits[0, 20:]
    assert (out.logits[0, 12:] - plain).abs().max() < TOLERANCE
    assert (torch.cat([out.logits[1, 5:15], out.logits[1, 20:30]]) - short).abs().max() < TOLERANCE
    assert (after - expected_after).abs().max() < TOLERANCE
    assert out.past_key_values.position.tolist() == [40, 20]


@pytest.mark.parametrize("name", ALL)
def test_packed_documents(name: str) -> None:
    model, x = build(name), tokens(1, 40)
    cuts = torch.tensor([0, 1, 18, 40])
    with torch.no_grad():
        packed = model(x, cu_seqlens=cuts)
        for n, (a, b) in enumerate(itertools.pairwise(cuts)):
            alone = model(x[:, a:b])
            assert (packed.logits[:, a:b] - alone.logits).abs().max() < TOLERANCE
            assert int(packed.past_key_values.position[n]) == int(b - a)


@pytest.mark.parametrize("name", STATES)
def test_greedy_generation_with_left_padding_equals_without(name: str) -> None:
    model, x = build(name), tokens(2, 30)
    rows = torch.cat([torch.full((2, 9), 257), x], 1)
    rows[1, :20] = 257
    mask = (rows != 257).long()
    # Without an end token every row has 5 new ones; a row that stops early is padded to the length of its batch.
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    batch = model.generate(rows, attention_mask=mask, **options)
    alone = [model.generate(rows[i : i + 1, mask[i] == 1], **options)[0, -5:] for i in range(2)]
    assert torch.equal(batch[:, -5:], torch.stack(alone))
    without_cache = model.generate(rows, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(batch, without_cache)


@pytest.mark.parametrize("name", ["mamba2", "mixed"])
def test_beams_and_samples(name: str) -> None:
    model, x = build(name), tokens(2, 20)
    beams = model.generate(x, max_new_tokens=6, num_beams=3, do_sample=False)
    uncached = model.generate(x, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(beams, uncached)
    torch.manual_seed(1)
    first = model.generate(x, max_new_tokens=6, do_sample=True, num_return_sequences=2)
    torch.manual_seed(1)
    assert torch.equal(first, model.generate(x, max_new_tokens=6, do_sample=True, num_return_sequences=2))
    with pytest.raises(ValueError, match="stateful"):
        model.generate(x[:1], max_new_tokens=4, do_sample=False, assistant_model=build(name))


@pytest.mark.parametrize("name", STATES)
def test_generation_from_a_carried_state_equals_reading_everything(name: str) -> None:
    model, x = build(name), tokens(2, 20)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    # Of two beams of two rows, the first of each shows a state that went to the wrong row.
    whole = {beams: model.generate(x, num_beams=beams, **options)[:, 20:] for beams in (1, 2)}
    options["attention_mask"] = torch.ones_like(x)
    for cut in (1, 13, 19):
        with torch.no_grad():
            state = model(x[:, :cut]).past_key_values
        copies = state.map(torch.clone)
        # One token that is left is read as a step: by a row and by each of its beams.
        for beams in {1: (1,), 13: (2,), 19: (1, 2)}[cut]:
            rest = model.generate(x[:, cut:], past_key_values=state, num_beams=beams, **options)
            assert torch.equal(rest[:, 20 - cut :], whole[beams]), (cut, beams)
        # transformers also takes the whole prompt beside a state that has read a part of it, of each beam or of a row.
        beams = 1 if cut == 1 else 2
        again = model.generate(x, past_key_values=state, num_beams=beams, **options)
        assert torch.equal(again[:, 20:], whole[beams]), (cut, beams)
        if cut == 13:
            spread = model.generate(x[:, cut:], past_key_values=state.repeat_rows(2), num_beams=2, **options)
            assert torch.equal(spread[:, 20 - cut :], whole[2]), cut
        for layer, copy in zip(state.layers, copies.layers, strict=True):
            assert all(torch.equal(layer[n], copy[n]) for n in layer)


@pytest.mark.parametrize("shape", [(2, 1), (1, 6), (2, 5), (3, 6), (6,), (2, 1, 6)])
def test_a_mask_of_another_shape_is_refused_and_not_broadcast(shape: tuple[int, ...]) -> None:
    model, ids = build("gla"), torch.ones(2, 6, dtype=torch.long)
    for mask in (torch.ones(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"attention_mask must be \[2, 6\] or longer; got \["):
            model(ids, attention_mask=mask)


def test_a_mask_that_does_not_cover_the_carried_state_is_refused() -> None:
    model, x = build("gla"), tokens(1, 20)
    state = model.zero_state(1)
    assert model.generate(x, past_key_values=state, max_new_tokens=2).shape[1] <= 22
    with torch.no_grad():
        state = model(x).past_key_values
    for mask in (None, torch.ones_like(x)):
        with pytest.raises(UserError, match=r"mask has 20 columns, but the given state has read 20"):
            model.generate(x, past_key_values=state, max_new_tokens=2, attention_mask=mask)


@pytest.mark.parametrize("name", ALL)
def test_a_forward_pass_mutates_nothing_it_was_given(name: str) -> None:
    model, x = build(name), tokens(2, 20)
    with torch.no_grad():
        state = model(x).past_key_values
        copies = state.map(torch.clone)
        model(x, past_key_values=state)
    for layer, copy in zip(state.layers, copies.layers, strict=True):
        assert all(torch.equal(layer[n], copy[n]) for n in layer)


@pytest.mark.parametrize("name", ALL)
def test_gradient_checkpointing_with_a_carried_state_gives_the_same_gradients(name: str) -> None:
    model, x = build(name).train(), tokens(2, 30)
    with torch.no_grad():
        state = model(x).past_key_values
    gradients = []
    for enabled in (False, True):
        (model.gradient_checkpointing_enable if enabled else model.gradient_checkpointing_disable)()
        model.zero_grad()
        model(x, past_key_values=state, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    # The same operations run twice: only the order of accumulation may differ.
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_checkpoints_find_states_as_unread_as_their_forward_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run again after the context has ended; what a mixer leaves out in it must be left out then too."""
    model, seen = build("mamba2").train(), []
    kept = model.model.layers[0].forward

    def forward(*args: Any) -> Any:
        seen.append(states_are_unread())
        return kept(*args)

    monkeypatch.setattr(model.model.layers[0], "forward", forward)
    model.gradient_checkpointing_enable()
    for unread in (True, False):
        with unread_states() if unread else contextlib.nullcontext():
            loss = model(tokens(1, 9), labels=tokens(1, 9)).loss
        loss.backward()
        assert seen == [unread, unread]
        seen.clear()


@pytest.mark.parametrize("name", list(RECURRENT))
def test_every_parameter_and_the_initial_state_get_a_gradient(name: str) -> None:
    model = build(name).train()
    for module in model.modules():
        if hasattr(module, "progress"):
            module.progress.fill_(0.5)
    state = model.zero_state(2).map(lambda t: torch.randn_like(t).requires_grad_())
    model(tokens(2, 20), past_key_values=state, labels=tokens(2, 20)).loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert missing == []
    assert all(bool(t.grad.abs().sum() > 0) for layer in state.layers for t in layer.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_low_precision_is_close_and_keeps_float32_states(name: str, dtype: torch.dtype) -> None:
    model, x = build(name, initializer_range=0.1), tokens(2, 40)
    with torch.no_grad():
        expected = model(x).logits
        out = model.to(dtype)(x)
        # The same weights, rounded to `dtype`, in float32 arithmetic: what rounding costs before anything is computed.
        rounded_weights = (model.float()(x).logits - expected).std()
    states = [t for layer in out.past_key_values.layers for n, t in layer.items() if n.endswith("recurrent")]
    assert all(t.dtype == torch.float32 for t in states)
    error = (out.logits.float() - expected).std()
    # How much a model amplifies a rounding depends on its depth and mixers, alike for weights and activations. A layer
    # rounds about four times as many activations as it has weight matrices: independent errors of the weights' kind
    # add up to sqrt(1 + 4) = 2.2 of it; measured are 0.8 to 2.0.
    assert error < 3 * rounded_weights
    if name != "mixed":
        # Two layers of some ten roundings, each at most half a unit in the last place: sqrt(20) units and a factor of 2
        # for the norms, which blow small heads up. bf16 has 8 bits (a unit is 2^-7), fp16 11.
        assert error < 2 * 20**0.5 * torch.finfo(dtype).eps / 2 * expected.std()


@pytest.mark.parametrize("tied", [True, False])
def test_config_predicts_every_tensor_and_save_pretrained_round_trips(tmp_path: Path, tied: bool) -> None:
    model = build("mixed", tie_word_embeddings=tied).float()
    named = {n: tuple(t.shape) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert named == model.config.tensor_shapes()
    model.save_pretrained(tmp_path)
    # A copy: tensors mapped from a file may lie at odd addresses, where products differ in the last bit.
    again = deepcopy(RecurrentLM.from_pretrained(tmp_path))
    assert again.fingerprint() == model.fingerprint()
    assert torch.equal(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


@pytest.mark.parametrize("name", ALL)
def test_state_round_trip_and_refusal_of_another_model(name: str, tmp_path: Path) -> None:
    model, x = build(name), tokens(2, 33)
    with torch.no_grad():
        state = model(x[:, :20]).past_key_values
        state.save(tmp_path / "s.safetensors", model.fingerprint())
        again = RecurrentState.load(tmp_path / "s.safetensors", model)
        expected = model(x[:, 20:], past_key_values=state).logits
        assert torch.equal(model(x[:, 20:], past_key_values=again).logits, expected)
        model.model.norm.weight.mul_(1.5)
    with pytest.raises(UserError, match="holds the state of model"):
        RecurrentState.load(tmp_path / "s.safetensors", model)
    with pytest.raises(UserError, match=r"^cannot write the state file .*/inner: .*; choose another place$"):
        state.save(tmp_path / "s.safetensors" / "inner", model.fingerprint())
    (tmp_path / "broken").write_bytes(b"\x00" * 40)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        RecurrentState.load(tmp_path / "broken", model)


def test_zero_state_is_what_no_state_means() -> None:
    model, x = build("mixed"), tokens(2, 12)
    with torch.no_grad():
        plain, zero = model(x).logits, model(x, past_key_values=model.zero_state(2)).logits
    # float64; a filter of many taps transforms fewer numbers where nothing came before, and so rounds otherwise.
    torch.testing.assert_close(plain, zero, rtol=1e-12, atol=1e-12)


def test_hidden_states_are_the_stream_with_every_sum_made() -> None:
    model, ids = build("gated_delta_net"), tokens(2, 9)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        assert torch.equal(out.logits, model(ids).logits)
        first, second = model.model.layers
        start, between, normed = out.hidden_states
        rest = (None, None, torch.zeros(2, dtype=torch.long), torch.float32)
        assert torch.equal(start, model.model.embeddings(ids))
        # The first layer has no MLP, so that its mixer's output is added; what the second one adds is an MLP's.
        stream, update, _ = first(start, None, *rest)
        assert torch.equal(stream, start) and torch.equal(stream + update, between)
        handed_on = second(stream, update, *rest)
        assert all(torch.equal(a, b) for a, b in zip(handed_on[:2], second(between, None, *rest)[:2], strict=True))
        assert torch.equal(model.model.norm(handed_on[0] + handed_on[1]), normed)


def test_loss_counts_only_labels_and_survives_none() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0] = -100
    expected = torch.nn.functional.cross_entropy(logits[1, :-1], labels[1, 1:])
    assert torch.allclose(next_token_loss(logits, labels), expected)
    assert float(next_token_loss(logits, torch.full((2, 5), -100))) == 0.0


def test_the_loss_alone_is_the_same_loss_with_the_same_gradients() -> None:
    model = build("gla").double()
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(9) % 3 == 0, -100)
    gradients = []
    for alone in (False, True):
        model.zero_grad()
        out = model(ids, labels=labels, loss_only=alone)
        assert (out.logits is None) == alone
        out.loss.backward()
        gradients.append([out.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert float(model(ids, labels=torch.full_like(ids, -100), loss_only=True).loss.detach()) == 0.0
    with pytest.raises(ValueError, match="labels"):
        model(ids, loss_only=True)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"mixer": {"type": "mamba3"}}, 'layer 0: unknown mixer type "mamba3".*Did you mean "mamba"'),
        ({"mixer": {"type": "gla", "num_head": 2}}, 'has no field "num_head".*Did you mean "num_heads"'),
        ({"mixer": {"type": "gla", "num_heads": 2}}, "is incomplete"),
        ({"mixer": {"type": "mamba2", "inner_dim": 65, "head_dim": 16, "state_dim": 4}}, "must divide inner_dim"),
        ({"mixer": {"type": "gla", "num_heads": 0, "key_dim": 4, "value_dim": 4}}, "positive whole number"),
        ({"mixer": MIXERS["gla"], "mlp": 3}, 'no field "mlp".*Did you mean "mlp_size"'),
    ],
)
def test_bad_layer_descriptions_are_named(layer: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RecurrentConfig(layers=[layer])


def peak_bytes(model: RecurrentLM, length: int) -> int:
    """Most bytes that one forward pass over `length` tokens holds at once, from the allocator's own records."""
    x = tokens(1, length)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        model(x, logits_to_keep=1)
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert changes, "the profiler recorded no allocation"
    return max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("name", list(MIXERS))
def test_memory_of_a_forward_without_gradients_grows_no_faster_than_the_sequence(name: str) -> None:
    model = build(name, depth=1)
    # Both lengths are whole segments, so a + b T with a >= 0 gives 4 at most; a T x T matrix would show as up to 16.
    # Attention takes 1,024 tokens at once.
    length = 1024 if name.startswith(("attention", "mla", "hymba", "parallel")) else 512
    assert peak_bytes(model, 4 * length) <= 4.05 * peak_bytes(model, length)


@pytest.mark.parametrize("name", ALL)
def test_carried_state_at_awkward_lengths_ends_where_one_forward_ends(name: str) -> None:
    """Segments of prime lengths, around the chunks of the recurrences and the taps of the convolutions."""
    model, lengths = build(name), (2, 3, 61, 1, 67, 5, 131)
    x = tokens(2, sum(lengths))
    with torch.no_grad():
        whole = model(x)
        state = model.zero_state(2)
        for part in x.split(lengths, dim=1):
            state = model(part, past_key_values=state).past_key_values
    assert state.position.tolist() == [sum(lengths)] * 2
    for found, expected in zip(state.layers, whole.past_key_values.layers, strict=True):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            # A state is a sum over 270 tokens of magnitude 1 to 20: the promised 1e-4 is relative above 1.
            torch.testing.assert_close(found[key], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


def test_the_kept_signature_is_that_of_the_code() -> None:
    """generate() asks for it five times a call, and made it anew each time."""
    code = RecurrentLM.forward.__code__
    kept = inspect.signature(RecurrentLM.forward)
    assert kept is RecurrentLM.forward.__signature__  # type: ignore[attr-defined]
    names = [name for name, kind in kept.parameters.items() if kind.kind is kind.POSITIONAL_OR_KEYWORD]
    assert tuple(names) == code.co_varnames[: code.co_argcount]
    assert tuple(kept.parameters)[-1] == "kwargs"
    defaults = tuple(one.default for one in kept.parameters.values() if one.default is not one.empty)
    assert defaults == RecurrentLM.forward.__defaults__
