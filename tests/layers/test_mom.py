"""Mixture of Memories: its formula token by token, routing, gathered against masked reading, the balance loss."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.layers.mixers import mom
from longrecall.layers.mixers.base import AUXILIARY_LOSS
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import fixed_shapes
from longrecall.training.initial_states.zero import Zero
from longrecall.training.segments import read_batch

D, LENGTH, H, K, V = 12, 37, 2, 4, 5
MOM: dict[str, Any] = {"type": "mom", "num_heads": H, "key_dim": K, "value_dim": V, "memories": 3}
CASES: dict[str, dict[str, Any]] = {
    "two_of_three": MOM,
    "one_without_shared": {**MOM, "active": 1, "shared": False},
    "all": {**MOM, "active": 3, "conv_width": 0, "output_gate": False},
    "linear": {**MOM, "memories": 4, "rule": "gated_linear", "conv_width": 3},
}
# Sums of a few hundred float64 terms in another order.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
START = torch.zeros(2, dtype=torch.long)


def build(description: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A mixer in float64 whose every parameter is random, also where it begins at one, and its input."""
    generator = torch.Generator().manual_seed(3)
    mixer = mixer_config(description).build(D).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(parameter + 0.5 * torch.randn(parameter.shape, generator=generator))
    return mixer, torch.randn(2, LENGTH, D, generator=generator, dtype=torch.float64)


class Memory:
    """One memory of one sequence, reading a token at a time: its last projections and its state."""

    def __init__(self, m: nn.Module, index: int) -> None:
        c = m.config
        self.rule, self.width = c.rule, c.conv_width
        keys, values = slice(index * H * K, (index + 1) * H * K), slice(index * H * V, (index + 1) * H * V)
        heads = slice(index * H, (index + 1) * H)
        self.k, self.v = m.k_proj.weight[keys], m.v_proj.weight[values]
        self.taps = (m.k_conv.weight[keys], m.v_conv.weight[values]) if c.conv_width else None
        self.a, self.A, self.bias = m.a_proj.weight[heads], m.A_log[heads].exp(), m.dt_bias[heads]
        self.b = m.b_proj.weight[heads] if c.rule == "gated_delta" else None
        self.seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.state = torch.zeros(H, K, V, dtype=torch.float64)

    def convolve(self, which: int, new: Tensor) -> Tensor:
        self.seen[which].append(new)
        if self.taps is None:
            return F.silu(new)
        recent = self.seen[which][::-1][: self.width]
        taps = self.taps[which]
        return F.silu(sum(taps[:, self.width - 1 - age] * past for age, past in enumerate(recent)))

    def write(self, x: Tensor) -> None:
        k, v = self.convolve(0, self.k @ x).view(H, K), self.convolve(1, self.v @ x).view(H, V)
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        state = torch.exp(-self.A * torch.log(1 + torch.exp(self.a @ x + self.bias)))[:, None, None] * self.state
        if self.b is not None:
            beta = 1 / (1 + torch.exp(-self.b @ x))
            v = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        self.state = state + k[:, :, None] * v[:, None, :]


def read(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer by its definition, one sequence ``[T, d]`` and token after the other: outputs, final states."""
    c = m.config
    memories = [Memory(m, index) for index in range(c.memories + c.shared)]
    queries: list[Tensor] = []
    rows = []
    for token in x:
        queries.append(m.q_proj.weight @ token)
        if c.conv_width:
            recent = enumerate(queries[::-1][: c.conv_width])
            q = F.silu(sum(m.q_conv.weight[:, c.conv_width - 1 - age] * past for age, past in recent))
        else:
            q = F.silu(queries[-1])
        q = q.view(H, K)
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / K**0.5
        p = torch.exp(m.router.weight @ token)
        p = p / p.sum()
        best = sorted(range(c.memories), key=lambda i, p=p: -float(p[i]))[: c.active]
        weight = {i: p[i] / (sum(p[j] for j in best) if c.active > 1 else 1) for i in best}
        if c.shared:
            weight[c.memories] = torch.ones(())
        o = torch.zeros(H, V, dtype=torch.float64)
        for index, share in weight.items():
            memories[index].write(token)
            o = o + share * torch.einsum("hk,hkv->hv", q, memories[index].state)
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.o_norm.weight
        if c.output_gate:
            o = o * F.silu(m.g_proj.weight @ token).view(H, V)
        rows.append(m.o_proj.weight @ o.flatten())
    return torch.stack(rows), torch.cat([memory.state for memory in memories])


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_its_definition(name: str, gather: bool) -> None:
    mixer, x = build(CASES[name])
    with torch.no_grad(), contextlib.nullcontext() if gather else fixed_shapes():
        found, state = mixer(x, None, mask=None, position=START)
        for row in range(2):
            expected, final = read(mixer, x[row])
            torch.testing.assert_close(found[row], expected, **CLOSE)
            torch.testing.assert_close(state["recurrent"][row], final, **CLOSE)


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), cut=st.integers(1, LENGTH - 1), data=st.data())
def test_any_split_and_any_padding_give_the_same(name: str, cut: int, data: st.DataObject) -> None:
    mixer, x = build(CASES[name])
    real = torch.tensor(data.draw(st.permutations([True] * LENGTH + [False] * 9)))
    spread, mask = torch.full((2, LENGTH + 9, D), 7.0, dtype=x.dtype), real.expand(2, -1)
    spread[:, real] = x
    with torch.no_grad():
        whole, final = mixer(x, None, mask=None, position=START)
        first, state = mixer(x[:, :cut], None, mask=None, position=START)
        second, state = mixer(x[:, cut:], state, mask=None, position=START + cut)
        padded, padded_state = mixer(spread, None, mask=mask, position=START)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **CLOSE)
    torch.testing.assert_close(padded[:, real], whole, **CLOSE)
    for key, tensor in final.items():
        torch.testing.assert_close(state[key], tensor, **CLOSE)
        torch.testing.assert_close(padded_state[key], tensor, **CLOSE)


def test_a_token_changes_only_the_memories_it_chose() -> None:
    mixer, x = build(MOM)
    with torch.no_grad():
        _, before = mixer(x, None, mask=None, position=START)
        for t in range(5):
            token = x[:, t : t + 1]
            _, chosen, _ = mixer.route(token, None)
            _, after = mixer(token, before, mask=None, position=START + LENGTH)
            moved = (after["recurrent"] != before["recurrent"]).unflatten(1, (4, H)).flatten(2).any(-1)
            # The last one is shared.
            assert torch.equal(moved, torch.cat([chosen[:, 0], torch.ones(2, 1, dtype=torch.bool)], 1))
            assert chosen.sum() == 4


@pytest.mark.parametrize("started", [False, True])
def test_a_memory_without_tokens_stays_as_it_is(started: bool) -> None:
    mixer, x = build({**MOM, "active": 1, "shared": False})
    with torch.no_grad():
        mixer.router.weight.copy_(torch.eye(3, D))
    x = torch.cat([torch.full((2, LENGTH, 1), 50.0, dtype=x.dtype), x[..., 1:]], -1)
    state = mixer.config.zero_state(2, x.device, x.dtype) if started else None
    if state is not None:
        state = {name: torch.randn_like(tensor).requires_grad_() for name, tensor in state.items()}
    y, after = mixer(x, state, mask=None, position=START)
    rest = after["recurrent"][:, H:].detach()
    assert torch.equal(rest, torch.zeros_like(rest) if state is None else state["recurrent"][:, H:].detach())
    (y.sum() + after["recurrent"].sum()).backward()
    # Data parallelism waits for the gradient of every parameter, of idle memories too.
    assert all(p.grad is not None for p in mixer.parameters())


@pytest.mark.parametrize("name", CASES)
def test_gathered_and_masked_reading_have_the_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = build(CASES[name])
    gradients = []
    for gather in (True, False):
        monkeypatch.setattr(mom, "_may_gather", lambda x, gather=gather: gather)
        state = mixer.config.zero_state(2, x.device, x.dtype)
        leaves = [x.clone().requires_grad_(), *(t.requires_grad_() for t in state.values()), *mixer.parameters()]
        y, after = mixer(leaves[0], state, mask=None, position=START)
        loss = (y * y.detach().sin()).sum() + sum(t.square().sum() for t in after.values())
        gradients.append(torch.autograd.grad(loss, leaves))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_masked_reading_depends_on_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors without data: a length that depends on a value, which a CUDA graph forbids, fails on them.
    with FakeTensorMode():
        mixer, x = mixer_config(MOM).build(D).train(), torch.zeros(2, 40, D)
        with pytest.raises(DataDependentOutputException):
            mixer(x, None, mask=None, position=START)
        monkeypatch.setattr(mom, "_may_gather", lambda x: False)
        y, state = mixer(x, None, mask=None, position=START)
        (y.sum() + state[AUXILIARY_LOSS]).backward()
    assert y.shape == (2, 40, D) and all(p.grad is not None for p in mixer.parameters())


def test_nothing_is_gathered_where_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda", "meta")}

    def found() -> dict[str, bool]:
        return {name: mom._may_gather(x) for name, x in places.items()}

    recording = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    assert found() == {"cpu": True, "cuda": True, "meta": False}
    with fixed_shapes():
        assert found() == dict.fromkeys(places, False)
    recording = True
    assert found() == {"cpu": True, "cuda": False, "meta": False}


def test_balance_is_the_published_loss_over_real_tokens() -> None:
    mixer, x = build({**MOM, "memories": 5, "active": 2, "balance": 0.3})
    mixer.train()
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7
    _, state = mixer(x, None, mask=mask, position=START)
    tokens = x[mask]
    p = (tokens @ mixer.router.weight.T).softmax(-1)
    best = p.argsort(-1, descending=True)[:, :2].flatten()
    share = torch.stack([(best == index).double().mean() for index in range(5)])
    torch.testing.assert_close(state[AUXILIARY_LOSS], 0.3 * 5 * (share * p.mean(0)).sum(), **CLOSE)
    (gradient,) = torch.autograd.grad(state[AUXILIARY_LOSS], mixer.router.weight)
    # Against the gradient the fullest memory's probability falls.
    fullest = share.argmax()
    after = (tokens @ (mixer.router.weight - 0.1 * gradient / gradient.norm()).T).softmax(-1).mean(0)
    assert after[fullest] < p.mean(0)[fullest]
    with torch.no_grad():
        mixer.router.weight.zero_()
    _, even = mixer(x, None, mask=None, position=START)
    # Equal probabilities: whatever is chosen, 5 * sum of f * 1/5 = 1.
    assert float(even[AUXILIARY_LOSS].detach()) == pytest.approx(0.3, abs=1e-12)


def test_no_balance_loss_outside_training_or_without_weight() -> None:
    mixer, x = build(MOM)
    assert AUXILIARY_LOSS not in mixer(x, None, mask=None, position=START)[1]
    mixer, x = build({**MOM, "balance": 0.0})
    assert AUXILIARY_LOSS not in mixer.train()(x, None, mask=None, position=START)[1]


def model_of(*mixers: dict[str, Any]) -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(RecurrentConfig(vocab_size=30, hidden_size=D, layers=[{"mixer": m} for m in mixers]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_sums_the_layers_losses_and_training_adds_them(checkpointing: bool) -> None:
    gla = {"type": "gla", "num_heads": 1, "key_dim": 4, "value_dim": 4}
    model = model_of(MOM, gla, {**MOM, "balance": 0.5}, {"type": "handover", "old": gla, "new": MOM}).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(30, (2, 25), generator=torch.Generator().manual_seed(1))
    losses: list[Tensor] = []
    for layer in model.model.layers:
        layer.mixer.register_forward_hook(
            lambda module, inputs, output: losses.extend(t for n, t in output[1].items() if n.endswith(AUXILIARY_LOSS))
        )
    out = model(ids, labels=ids)
    assert len(losses) == 3
    # The hooks see the same numbers as the model: one sum of three.
    torch.testing.assert_close(out.auxiliary_loss, sum(losses[1:], losses[0]))
    assert not any(name.endswith(AUXILIARY_LOSS) for layer in out.past_key_values.layers for name in layer)
    text = torch.zeros(2, dtype=torch.bool)
    total = read_batch(model, ids, ids, text, Zero())
    torch.testing.assert_close(total, out.loss + out.auxiliary_loss)
    total.backward()
    expected = torch.autograd.grad(out.loss + out.auxiliary_loss, list(model.parameters()), allow_unused=True)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)
    pure = torch.autograd.grad(model(ids, labels=ids).loss, model.model.layers[2].mixer.router.weight)[0]
    assert not torch.allclose(pure, model.model.layers[2].mixer.router.weight.grad)


def test_other_models_have_no_auxiliary_loss() -> None:
    model = model_of({"type": "gla", "num_heads": 1, "key_dim": 4, "value_dim": 4}).train()
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert model(ids, labels=ids).auxiliary_loss is None
    assert model_of(MOM).eval()(ids).auxiliary_loss is None


def test_balance_evens_the_memories_out_when_trained() -> None:
    """A router that sends everything to one memory learns to use all of them."""
    torch.manual_seed(0)
    mixer = mixer_config({**MOM, "active": 1, "balance": 1.0}).build(D).train()
    x = torch.randn(4, 50, D) + 1
    with torch.no_grad():
        mixer.router.weight[0] += 1

    def fullest() -> float:
        return float(mixer.route(x, None)[1].double().mean((0, 1)).max())

    before, optimizer = fullest(), torch.optim.Adam([mixer.router.weight], 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        mixer.route(x, None)[2].backward()
        optimizer.step()
    # From one memory for all to at most half of the tokens; a third each would be perfect.
    assert before > 0.95 and fullest() < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"active": 4}, r"active \(4\) cannot be more than memories \(3\)"),
        ({"active": 0}, "active must be a positive whole number"),
        ({"rule": "delta"}, "rule must be one of gated_delta, gated_linear"),
        ({"balance": -1}, "balance must be a number from 0"),
        ({"balance": float("nan")}, "balance must be a number from 0"),
        ({"memory": 3}, 'no field "memory".*Did you mean "memories"'),
    ],
)
def test_descriptions_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixer_config({**MOM, **change})


def test_init_info_and_generate_know_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"vocab_size": 258, "hidden_size": D, "layers": [{"mixer": MOM, "repeat": 2}]}))
    assert main(["init", str(path), str(tmp_path / "fresh")]) == 0
    capsys.readouterr()
    assert main(["info", str(tmp_path / "fresh")]) == 0
    assert "mom" in (text := capsys.readouterr().out) and "memories=3 active=2" in text
    assert main(["generate", str(tmp_path / "fresh"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
