"""The retrieval layer: its definition, what it may see, its state, its edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from longrecall.diagnostics.effective_remembrance import join_rows
from longrecall.errors import UserError
from longrecall.layers.descriptions.retrieval import RUNNERS_UP
from longrecall.layers.retrieval.module import Retrieval
from longrecall.layers.tokens import EMBEDDING_EPS
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states import make_initial_state
from longrecall.training.recipe_states import StatePassingRecipe, TruncatedBpttRecipe
from tests.conftest import MIXERS

BASES = [name for name in MIXERS if name != "retrieval"]
CHUNK, WIDTH = 5, 32
# float64 after two layers: sums in another order, and the transforms of the long convolutions.
EXACT = 1e-9


def retrieval(base: str = "gla", **changes: Any) -> dict[str, Any]:
    sizes = {"chunk": CHUNK, "top_k": 2, "encoder_dim": 12, "num_heads": 4, "head_dim": 6, "kv_heads": 2}
    return {"type": "retrieval", "base": MIXERS[base], **sizes, **changes}


def model_of(*mixers: dict[str, Any], dtype: torch.dtype = torch.float64, seed: int = 0) -> RecurrentLM:
    torch.manual_seed(seed)
    layers = [{"mixer": mixer} for mixer in mixers]
    config = RecurrentConfig(vocab_size=64, hidden_size=WIDTH, layers=layers, initializer_range=0.3)
    return RecurrentLM(config).to(dtype).eval()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: RecurrentLM, ids: Tensor, lengths: list[int], state: RecurrentState | None = None) -> Tensor:
    """Logits of `ids` read in segments."""
    pieces = []
    for part in ids.split(lengths, dim=1):
        out = model(part, past_key_values=state)
        state = out.past_key_values
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


def by_definition(layer: Retrieval, x: Tensor, embeddings: Tensor) -> Tensor:
    """One row, token by token: RESONA's algorithms 2 and 3 with every chunk and weight written out."""
    config, (length, width) = layer.config, x.shape
    mixed = layer.base(x[None], None, mask=None, position=torch.zeros(1, dtype=torch.long))[0][0]
    scaled = embeddings / (embeddings.square().mean(-1, keepdim=True) + EMBEDDING_EPS).sqrt()
    group = config.num_heads // config.kv_heads
    rows = []
    for t in range(length):
        ended = [c for c in range(length // config.chunk) if (c + 1) * config.chunk <= t]
        parts = [scaled[c * config.chunk : (c + 1) * config.chunk] for c in ended]
        query = layer.query_encoder.weight @ x[t]
        scores = [F.cosine_similarity(query, (p @ layer.chunk_encoder.weight.T).mean(0), 0, eps=1e-12) for p in parts]
        order = sorted(range(len(parts)), key=lambda c: -float(scores[c]))
        best, share = order[: config.top_k], 1.0
        if not best:
            rows.append(mixed[t])
            continue
        if layer.temperature is not None:
            strength = (layer.temperature.exp() * torch.stack(scores)).exp()
            share = strength[best].sum() / strength[order[: config.top_k + RUNNERS_UP]].sum()
        found = []
        for head in range(config.num_heads):
            own = slice(head // group * config.head_dim, (head // group + 1) * config.head_dim)
            q = (layer.q_proj.weight @ x[t])[head * config.head_dim : (head + 1) * config.head_dim]
            k, v = ((torch.cat([parts[c] for c in best]) @ w.weight.T)[:, own] for w in (layer.k_proj, layer.v_proj))
            logits = k @ q / config.head_dim**0.5
            if layer.temperature is not None:
                raised = torch.stack([scores[c] for c in best]).repeat_interleave(config.chunk)
                logits = torch.cat([logits + layer.temperature.exp() * raised, x.new_zeros(config.chunk)])
                v = torch.cat([v, v.new_zeros(config.chunk, config.head_dim)])
            found.append(share * (logits.softmax(0) @ v))
        alpha = torch.full((width,), config.alpha, dtype=x.dtype)
        if layer.blend is not None:
            alpha = layer.blend.bias if layer.blend.weight is None else layer.blend.weight @ x[t] + layer.blend.bias
        rows.append(alpha * mixed[t] + (1 - alpha) * (layer.o_proj.weight @ torch.cat(found)))
    return torch.stack(rows)


@pytest.mark.parametrize("selector", ["weighted", "hard"])
@pytest.mark.parametrize("blend", ["fixed", "learned", "input"])
@pytest.mark.parametrize(("kv_heads", "top_k"), [(1, 2), (4, 1), (2, 9)])
@torch.no_grad()
def test_layer_computes_its_definition(selector: str, blend: str, kv_heads: int, top_k: int) -> None:
    model = model_of(retrieval(selector=selector, blend=blend, kv_heads=kv_heads, top_k=top_k, alpha=0.3))
    layer = model.model.layers[0].mixer
    for parameter in layer.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    ids = tokens(1, 33)
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda module, args, output: seen.extend([args[0], output[0]]))
    model(ids)
    expected = by_definition(layer, seen[0][0], model.model.embeddings(ids)[0])
    torch.testing.assert_close(seen[1][0], expected, rtol=EXACT, atol=EXACT)
    alone = layer.base(seen[0], None, mask=None, position=torch.zeros(1, dtype=torch.long))[0]
    assert torch.equal(seen[1][0, :CHUNK], alone[0, :CHUNK])
    assert (seen[1] - alone)[0, CHUNK:].abs().amin(0).min() > 1e-6


@pytest.mark.parametrize("base", BASES)
def test_no_token_is_seen_before_its_time(base: str) -> None:
    """Row t > 0 has other tokens from t on: logits before t must not notice, whichever way the text is read."""
    model, length = model_of(retrieval(base), retrieval(base, chunk=3, top_k=3)), 12
    ids = tokens(1, length).expand(length, -1)
    changed = torch.where(torch.arange(length) < torch.arange(length)[:, None], ids, (ids + 1 + tokens(1, length)) % 64)
    changed[0] = ids[0]
    whole = read(model, ids[:1], [length])[0]
    for lengths in ([length], [4, 1, 5, 2], [1] * length):
        found = read(model, changed, lengths)
        assert (found[3, 3:] - whole[3:]).abs().amax(-1).min() > EXACT
        for t in range(1, length):
            assert (found[t, :t] - whole[:t]).abs().max() < EXACT, (t, lengths)
        assert (found[0] - whole).abs().max() < EXACT, lengths


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    blend=st.sampled_from(["fixed", "input"]),
)
def test_ragged_padding_in_segments_equals_each_row_alone(lengths: list[int], seed: int, blend: str) -> None:
    model, total = model_of(retrieval(blend=blend, alpha=0.6), retrieval("mamba2", chunk=2)), sum(lengths)
    mask = torch.rand(3, total, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, -1] = True
    ids, state, pieces = tokens(3, total, seed), None, []
    with torch.no_grad():
        for part, keep in zip(ids.split(lengths, 1), mask.split(lengths, 1), strict=True):
            out = model(part, attention_mask=keep.long(), past_key_values=state)
            state = out.past_key_values
            pieces.append(out.logits)
        for row in range(3):
            alone = model(ids[row, mask[row]][None])
            assert (torch.cat(pieces, 1)[row, mask[row]] - alone.logits[0]).abs().max() < EXACT
            count = int(mask[row].sum())
            assert state.context[row, :count].tolist() == ids[row, mask[row]].tolist()
            assert bool((state.context[row, count:] == -1).all())
            ended = alone.past_key_values.layers[0]["chunk"][0]
            vectors = state.layers[0]["chunk"][row]
            assert torch.allclose(vectors[: len(ended)], ended, atol=EXACT)
            assert bool((vectors[len(ended) :] == 0).all())


def test_gradients_through_segments_equal_those_of_one_pass() -> None:
    model, ids = model_of(retrieval(blend="learned"), retrieval("gated_delta_net")), tokens(2, 30)
    gradients = []
    for lengths in ([30], [13, 1, 16], [4] * 7 + [2]):
        model.zero_grad()
        state, total = None, torch.zeros(())
        for part in ids.split(lengths, 1):
            out = model(part, past_key_values=state)
            state, total = out.past_key_values, total + out.logits.square().sum()
        total.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for other in gradients[1:]:
        for name, expected in gradients[0].items():
            assert float(expected.abs().max()) > 0, name
            torch.testing.assert_close(other[name], expected, rtol=EXACT, atol=EXACT * float(expected.abs().max()))


@pytest.mark.parametrize("base", ["gla", "mamba2", "gated_delta_net", "attention"])
@pytest.mark.parametrize("blend", ["learned", "input"])
def test_alpha_one_is_the_mixer_exactly_and_everything_learns_in_two_steps(base: str, blend: str) -> None:
    model = model_of(retrieval(base, blend=blend, alpha=1.0), dtype=torch.float32).train()
    plain = model_of(MIXERS[base], dtype=torch.float32)
    names = {n: n.replace("mixer.", "mixer.base.") for n in plain.state_dict()}
    plain.load_state_dict({n: model.state_dict().get(names[n], model.state_dict().get(n)) for n in names})
    ids = tokens(2, 40)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_hard_selection_leaves_the_encoders_as_they_are() -> None:
    model = model_of(retrieval(selector="hard")).train()
    model(tokens(2, 40), labels=tokens(2, 40)).loss.backward()
    without = {n.rpartition(".mixer.")[2] for n, p in model.named_parameters() if p.grad is None}
    assert without == {"chunk_encoder.weight", "query_encoder.weight"}
    assert not any(p.requires_grad for n, p in model.named_parameters() if "_encoder" in n)


@torch.no_grad()
@pytest.mark.parametrize("selector", ["weighted", "hard"])
def test_scores_begin_as_cosines_of_embeddings(selector: str) -> None:
    model = model_of(retrieval(encoder_dim=48, selector=selector), dtype=torch.float32)
    layer, x = model.model.layers[0].mixer, torch.randn(7, WIDTH)
    single = x[:, None]
    found = layer.encode_queries(x) @ layer.encode_chunks(single).mT
    # 48 rows of an orthonormal basis keep 32 channels exactly, up to float32 products.
    assert (found - F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).T).abs().max() < 1e-5


@torch.no_grad()
def test_without_a_finished_chunk_the_layer_is_the_mixer() -> None:
    """A chunk longer than the sequence, and a prompt that has just filled its first chunk."""
    for chunk, length in ((100, 40), (40, 40)):
        model = model_of(retrieval(chunk=chunk), dtype=torch.float32)
        layer, ids = model.model.layers[0].mixer, tokens(2, length)
        seen: list[Tensor] = []
        handle = layer.register_forward_hook(lambda module, args, output, seen=seen: seen.extend([args[0], output[0]]))
        state = model(ids).past_key_values
        handle.remove()
        alone = layer.base(seen[0], None, mask=None, position=torch.zeros(2, dtype=torch.long))[0]
        assert torch.equal(seen[1], alone)
        assert state.layers[0]["chunk"].shape[1] == length // chunk


@torch.no_grad()
def test_more_chunks_than_there_are_means_all_of_them() -> None:
    ids = tokens(2, 4 * CHUNK + 2)
    found = [model_of(retrieval(top_k=k))(ids).logits for k in (3, 4, 50)]
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])


@torch.no_grad()
@pytest.mark.parametrize("outer", ["handover", "hymba"])
def test_inside_other_layers(outer: str) -> None:
    inner = (
        {"type": "handover", "old": retrieval(), "new": retrieval("mamba2", top_k=1)}
        if outer == "handover"
        else {"type": "hymba", "attention": retrieval("attention"), "ssm": MIXERS["mamba2"]}
    )
    model, ids = model_of(inner), tokens(2, 24)
    for module in model.modules():
        if hasattr(module, "progress"):
            module.progress.fill_(0.5)
    whole = read(model, ids, [24])
    assert (read(model, ids, [9, *[1] * 15]) - whole).abs().max() < EXACT
    assert model.config.reads_tokens() and model.zero_state(2).context.shape == (2, 0)


@torch.no_grad()
def test_the_state_keeps_ids_once_and_one_vector_a_finished_chunk(tmp_path: Any) -> None:
    layer = retrieval(chunk=64, encoder_dim=64, top_k=1)
    model = model_of(layer, layer, dtype=torch.bfloat16)
    length = 2048 + 63
    state = model(tokens(1, length)).past_key_values
    grown = [x["chunk"].numel() * x["chunk"].element_size() for x in state.layers]
    # 128 bytes for 64 tokens: 256 KiB a layer at 128k tokens.
    assert grown == [length // 64 * 64 * 2] * 2 and 131072 // 64 * 64 * 2 < 2**20
    assert state.context.numel() * state.context.element_size() == 4 * length
    assert all(set(x) == {"base.recurrent", "chunk"} for x in state.layers)
    state.save(tmp_path / "state", model.fingerprint())
    again = RecurrentState.load(tmp_path / "state", model)
    assert torch.equal(again.context, state.context) and again.context.dtype == torch.int32
    assert state.repeat_rows(2).context.shape[0] == 2
    assert state.to("cpu").context is not None


@torch.no_grad()
def test_rows_that_join_later_read_nothing_of_the_others() -> None:
    model, ids = model_of(retrieval()), tokens(2, 40)
    state = join_rows(model(ids[:1, :17]).past_key_values, 1)
    found = read(model, torch.cat([ids[:1, 17:], ids[1:, 17:]]), [6, 17], state)
    assert (found[0] - model(ids[:1]).logits[0, 17:]).abs().max() < EXACT
    assert (found[1] - model(ids[1:, 17:]).logits[0]).abs().max() < EXACT


@pytest.mark.parametrize("recipe", [StatePassingRecipe(), TruncatedBpttRecipe()])
def test_a_passed_state_has_no_tokens_to_look_up(recipe: Any) -> None:
    model, text = model_of(retrieval()), torch.ones(2, dtype=torch.bool)
    initial = make_initial_state(recipe, model, 0, 0)
    initial.before_batch(text)
    initial.after_batch(model(tokens(2, 30)).past_key_values)
    before = initial.before_batch(text)
    assert before.context.shape == (2, 0) and before.layers[0]["chunk"].shape[1] == 0
    assert float(before.layers[0]["base.recurrent"].detach().abs().sum()) > 0
    # Only the recurrent state is left of the batch before: the first chunk is open, so the layer is its mixer.
    ids, layer, seen = tokens(2, 4, seed=3), model.model.layers[0].mixer, []
    layer.register_forward_hook(lambda module, args, output: seen.extend([args[0], output[0]]))
    model(ids, past_key_values=before)
    inner = {"recurrent": before.layers[0]["base.recurrent"]}
    assert torch.equal(seen[1], layer.base(seen[0], inner, mask=None, position=before.position)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": retrieval()}, "base already has a retrieval layer"),
        ({"base": {"type": "handover", "old": MIXERS["gla"], "new": retrieval()}}, "already has a retrieval layer"),
        ({"selector": "soft"}, "selector must be one of weighted, hard, got 'soft'"),
        ({"blend": "gate"}, "blend must be one of fixed, learned, input"),
        ({"alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5"),
        ({"alpha": True}, '"alpha" is True; it must be a finite number'),
        ({"kv_heads": 3}, "kv_heads .3. must divide num_heads .4."),
        ({"chunk": 0}, "chunk must be a positive whole number"),
        ({"top_k": 1.5}, '"top_k" is 1.5; it must be a whole number'),
        ({"top_k": 0}, "top_k must be a positive whole number"),
        ({"topk": 2}, 'no field "topk".*Did you mean "top_k"'),
        ({"base": 3}, "a mixer is a mapping"),
    ],
)
def test_bad_descriptions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RecurrentConfig(layers=[{"mixer": retrieval() | change}])


def test_embeddings_without_ids_are_refused() -> None:
    model = model_of(retrieval())
    with pytest.raises(UserError, match="look up tokens by their ids: pass input_ids, not inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, WIDTH, dtype=torch.float64))


def test_a_training_step_never_waits_for_numbers() -> None:
    """On tensors without numbers whatever looks at one (``.item()``, ``bool``, a size that it decides) raises."""
    layers = [{"mixer": retrieval()}, {"mixer": retrieval("delta_net", selector="hard")}]
    with FakeTensorMode():
        model = RecurrentLM(RecurrentConfig(vocab_size=64, hidden_size=WIDTH, layers=layers)).train()
        ids = torch.zeros(2, 4 * CHUNK + 1, dtype=torch.long)
        model(ids, labels=ids).loss.backward()
        assert model.model.layers[0].mixer.chunk_encoder.weight.grad is not None
        with pytest.raises(DataDependentOutputException):
            bool(model(ids).logits.sum() > 0)
