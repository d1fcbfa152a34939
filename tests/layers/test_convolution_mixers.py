"""BaseConv, Hyena, H3 and Hymba against direct sums in float64, written from the papers' formulas."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from longrecall.cli.main import main
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.accounting import average_key_value_cache_size, key_value_cache_size
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops import diagonal_ssm, long_convolution
from longrecall.ops.execution import unread_states

HIDDEN = 6
Array = NDArray[np.float64]
Weights = dict[str, Array]

EXACT = 1e-12
"""float64 sums of some tens of terms of magnitude 1, in another order or by transforms; relative above 1."""

PLAIN: dict[str, dict[str, Any]] = {
    "base_conv": {"type": "base_conv", "channels": HIDDEN, "kernel": 4},
    "base_conv_wide": {"type": "base_conv", "channels": HIDDEN, "kernel": 19},
    "base_conv_implicit": {"type": "base_conv", "channels": HIDDEN, "implicit": True, "max_length": 11},
    "hyena": {"type": "hyena", "inner_dim": 5, "max_length": 13, "filter_width": 7, "filter_bands": 3},
    "h3": {"type": "h3", "num_heads": 2, "head_dim": 3, "state_dim": 4, "shift_dim": 5},
    "h3_wide_shift": {"type": "h3", "num_heads": 3, "head_dim": 1, "state_dim": 6, "shift_dim": 18},
}
ATTENTION = {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 4, "window": 5, "meta_tokens": 3}
HYMBA = {"type": "hymba", "attention": ATTENTION, "ssm": PLAIN["h3"]}


def layer(description: dict[str, Any], seed: int = 0) -> nn.Module:
    """In float64 with every parameter drawn anew, so that no zero or one hides a mistake."""
    torch.manual_seed(seed)
    module = mixer_config(description).build(HIDDEN).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith(("A_log", "A_imag", "log_step")):
                parameter.normal_(std=0.5)
    return module


def run(
    module: nn.Module, x: Tensor, state: LayerState | None = None, mask: Tensor | None = None, before: int = 0
) -> tuple[Tensor, LayerState]:
    position = torch.full((x.shape[0],), before)
    y, after = module(x, state, mask=mask, position=position)
    return y, after


def numbers(length: int, rows: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(module: nn.Module) -> Weights:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def explicit(w: Weights, name: str, x: Array) -> Array:
    """Causal convolution by the taps of a channel, the newest last: the double sum."""
    taps = w[f"{name}.weight"]
    y = np.zeros_like(x) + w.get(f"{name}.bias", 0.0)
    for t in range(len(x)):
        for s in range(max(0, t - taps.shape[1] + 1), t + 1):
            y[t] += taps[:, taps.shape[1] - 1 - (t - s)] * x[s]
    return y


def implicit(w: Weights, x: Array, description: dict[str, Any]) -> Array:
    """The filter of every lag by itself, then the double sum."""
    longest, bands = description["max_length"], description.get("filter_bands", 1)
    channels = w["filter.out_weight"].shape[0]
    y = np.zeros_like(x)
    for lag in range(len(x)):
        time = lag / (longest - 1)
        frequencies = np.linspace(1e-4, bands - 1, bands)
        angle = 2 * math.pi * lag / longest * frequencies
        h = np.concatenate([[time], np.cos(angle), -np.sin(angle)])
        h = np.sin(w["filter.frequency"] * (w["filter.in_weight"] @ h + w["filter.in_bias"]))
        for inner, bias in zip(w["filter.inner_weight"], w["filter.inner_bias"], strict=True):
            h = np.sin(w["filter.frequency"] * (inner @ h + bias))
        slow, fast = abs(math.log(0.01)) / 1.5, abs(math.log(0.01)) / 0.3
        window = [math.exp(-time * (slow + (fast - slow) * c / max(1, channels - 1))) for c in range(channels)]
        taps = (w["filter.out_weight"] @ h) * np.array(window)
        for t in range(lag, len(x)):
            y[t] += taps * x[t - lag]
    return y


def base_conv(w: Weights, x: Array, description: dict[str, Any]) -> Array:
    gate = x @ w["in_proj.weight"].T + w["in_proj.bias"]
    if not description.get("implicit"):
        return gate * explicit(w, "conv", x)
    return gate * (implicit(w, x, description) + w["skip"] * x + w["bias"])


def hyena(w: Weights, x: Array, description: dict[str, Any]) -> Array:
    projected = explicit(w, "conv", x @ w["in_proj.weight"].T + w["in_proj.bias"])
    first, second, value = np.split(projected, 3, axis=1)
    mixed = implicit(w, first * value, description) + w["D"] * first * value
    return (second * mixed) @ w["out_proj.weight"].T + w["out_proj.bias"]


def h3(w: Weights, x: Array, description: dict[str, Any]) -> Array:
    """Token by token with complex states, discretised by zero-order hold."""
    heads, width = description["num_heads"], description["head_dim"]
    q, k, v = (x @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in "qkv")
    q, k, v = (y.reshape(len(x), heads, width) for y in (q, explicit(w, "k_conv", k), v))
    a = -np.exp(w["A_log"]) + 1j * w["A_imag"]
    step = np.exp(w["log_step"])[:, None]
    decay, entry = np.exp(step * a), (np.exp(step * a) - 1) / a
    c = w["C"][..., 0] + 1j * w["C"][..., 1]
    state = np.zeros((heads, a.shape[1], width, width), dtype=complex)
    out = np.zeros((len(x), heads, width))
    for t in range(len(x)):
        product = k[t][:, :, None] * v[t][:, None, :]
        state = decay[:, :, None, None] * state + entry[:, :, None, None] * product[:, None]
        y = 2 * np.einsum("hm,hmij->hij", c, state).real + w["D"][:, None, None] * product
        out[t] = np.einsum("hi,hij->hj", q[t], y)
    return out.reshape(len(x), -1) @ w["o_proj.weight"].T + w["o_proj.bias"]


REFERENCE = {"base_conv": base_conv, "hyena": hyena, "h3": h3}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("length", [1, 2, 29])
def test_equals_the_direct_sums(name: str, length: int) -> None:
    """29 tokens are more than `max_length`, than any filter's taps and than no power of two."""
    module, x = layer(PLAIN[name]), numbers(length)
    with torch.no_grad():
        found, _ = run(module, x)
    expected = REFERENCE[PLAIN[name]["type"]](weights(module), x[0].numpy(), PLAIN[name])
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=EXACT, atol=EXACT * np.abs(expected).max())


def attention_with_meta(w: Weights, x: Array, description: dict[str, Any]) -> Array:
    """Every query by itself: meta tokens stand at -M..-1 and are always seen, others within the window."""
    heads, shared, width = description["num_heads"], description["kv_heads"], description["head_dim"]
    count, window = description["meta_tokens"], description["window"]

    def turned(y: Array, place: int) -> Array:
        half = width // 2
        angle = place * 10000.0 ** (-np.arange(half) / half)
        pairs = (y[:half] + 1j * y[half:]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag])

    q = (x @ w["q_proj.weight"].T).reshape(len(x), heads, width)
    k, v = ((x @ w[f"{n}_proj.weight"].T).reshape(len(x), shared, width) for n in "kv")
    out = np.zeros_like(q)
    for t in range(len(x)):
        for h in range(heads):
            g = h // (heads // shared)
            seen = [(m - count, w["meta_key"][m, g], w["meta_value"][m, g]) for m in range(count)]
            seen += [(s, k[s, g], v[s, g]) for s in range(max(0, t - window + 1), t + 1)]
            score = np.array([turned(q[t, h], t) @ turned(key, place) for place, key, _ in seen]) / math.sqrt(width)
            share = np.exp(score - score.max())
            out[t, h] = (share / share.sum()) @ np.array([value for _, _, value in seen])
    return out.reshape(len(x), -1) @ w["o_proj.weight"].T


def test_hymba_equals_its_branches_normed_and_averaged() -> None:
    module, x = layer(HYMBA), numbers(14)
    with torch.no_grad():
        found, _ = run(module, x)
    w = weights(module)
    parts = {path: {n.removeprefix(f"{path}."): a for n, a in w.items() if n.startswith(f"{path}.")} for path in HYMBA}
    branches = {
        "attention": attention_with_meta(parts["attention"], x[0].numpy(), ATTENTION),
        "ssm": h3(parts["ssm"], x[0].numpy(), PLAIN["h3"]),
    }
    mean = np.zeros((14, HIDDEN))
    for path, y in branches.items():
        mean += y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5) * w[f"{path}_norm.weight"] / 2
    np.testing.assert_allclose(found[0].numpy(), mean @ w["out_proj.weight"].T, rtol=1e-10, atol=1e-10)


EVERY = PLAIN | {"hymba": HYMBA, "hymba_three": HYMBA | {"third": PLAIN["hyena"]}}


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(EVERY)), cuts=st.lists(st.integers(0, 30), max_size=3), seed=st.integers(0, 99))
def test_segments_of_padded_rows_equal_the_bare_row(name: str, cuts: list[int], seed: int) -> None:
    """Any cuts, any padding: the real tokens of every row give what they give alone, outputs and final state."""
    module, x = layer(EVERY[name]), numbers(30, rows=2)
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 3] = True
    edges = sorted({0, 30, *cuts})
    with torch.no_grad():
        state, pieces, read = None, [], torch.zeros(2, dtype=torch.long)
        for start, stop in itertools.pairwise(edges):
            part = mask[:, start:stop]
            y, state = module(x[:, start:stop], state, mask=part, position=read)
            pieces.append(y)
            read = read + part.sum(1)
        found = torch.cat(pieces, 1)
        after, _ = module(numbers(2, rows=2, seed=9), state, mask=None, position=read)
        for row in range(2):
            alone, _ = run(module, torch.cat([x[row, mask[row]], numbers(2, rows=2, seed=9)[row]])[None])
            torch.testing.assert_close(found[row, mask[row]], alone[0, :-2], rtol=1e-10, atol=1e-10)
            # What follows depends on the whole state that is carried.
            torch.testing.assert_close(after[row], alone[0, -2:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", EVERY)
def test_no_output_depends_on_a_later_token(name: str) -> None:
    module, x = layer(EVERY[name]), numbers(23)
    x.requires_grad_()
    y, _ = run(module, x)
    (gradient,) = torch.autograd.grad(y[:, 9].sum(), x)
    # A transform spreads rounding over all tokens: the gradients before are of magnitude 1.
    assert gradient[:, 10:].abs().max() < 1e-13
    assert gradient[:, 9].abs().max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_is_alive_through_outputs_and_carried_state(name: str) -> None:
    module = layer(EVERY[name])
    _, state = run(module, numbers(7))
    y, _ = run(module, numbers(8, seed=3), state, before=7)
    y.square().sum().backward()
    dead = [n for n, p in module.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
    assert dead == []


@pytest.mark.parametrize("name", EVERY)
def test_unread_states_change_no_output(name: str) -> None:
    module = layer(EVERY[name])
    y, state = run(module, numbers(9, rows=2))
    with unread_states():
        found, kept = run(module, numbers(9, rows=2))
    assert torch.equal(found, y)
    # Only what takes time of its own is left out.
    left_out = {key for key in state if key not in kept}
    assert left_out == {key for key in state if "h3" in name or "hymba" in name if key.endswith("recurrent")}
    assert all(torch.equal(kept[key], state[key]) for key in kept)


def test_gradients_of_the_diagonal_recurrence_are_those_of_its_steps() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    u, rate, angle, gain, initial = draw(2, 9, 3, 4), draw(3, 5), draw(3, 5), draw(3, 5, 2), draw(2, 3, 10, 4)
    out_weight, state_weight = draw(2, 9, 3, 4).detach(), draw(2, 3, 10, 4).detach()
    state, outputs = torch.complex(*initial.chunk(2, dim=2)), []
    for t in range(9):
        state = torch.exp(torch.complex(-rate.abs(), angle))[..., None] * state + u[:, t, :, None]
        outputs.append(2 * (torch.view_as_complex(gain)[..., None] * state).sum(2).real)
    final = torch.cat([state.real, state.imag], dim=2)
    expected = (torch.stack(outputs, 1) * out_weight).sum() + (final * state_weight).sum()
    y, last = diagonal_ssm(u, rate.abs(), angle, gain, initial_state=initial)
    found = (y * out_weight).sum() + (last * state_weight).sum()
    inputs = (u, rate, angle, gain, initial)
    for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", EVERY)
def test_a_training_step_looks_at_no_number(name: str) -> None:
    """Tensors without numbers raise where code asks for one: such a step can be captured as a CUDA graph."""
    with FakeTensorMode():
        module = mixer_config(EVERY[name]).build(HIDDEN)
        y, _ = run(module, torch.empty(2, 21, HIDDEN))
        y.sum().backward()
    assert y.shape == (2, 21, HIDDEN) and all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("name", ["base_conv_implicit", "hyena", "h3"])
def test_filters_and_transforms_stay_in_float32_under_autocast(name: str) -> None:
    """bf16 keeps 8 bits; the long sums keep 24. What the projections round is the same with and without autocast's."""
    module = layer(PLAIN[name]).float()
    x = torch.randn(1, 64, HIDDEN, generator=torch.Generator().manual_seed(2))
    history = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(3))
    taps = torch.randn(4, 69, generator=torch.Generator().manual_seed(4))
    signal = x[..., :4]
    plain, _ = long_convolution(signal, taps, history=history)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y, state = run(module, x)
        assert torch.equal(long_convolution(signal, taps, history=history)[0], plain)
        if hasattr(module, "filter") and module.filter is not None:
            low = module.filter(64)
    if name == "h3":
        assert state["recurrent"].dtype == torch.float32
    else:
        assert torch.equal(low, module.filter(64).detach())
    assert y.isfinite().all()


def test_the_filter_goes_on_past_its_length_and_fades() -> None:
    module = layer(PLAIN["hyena"])
    taps = module.filter(200).detach()
    torch.testing.assert_close(taps[:, :13], module.filter(13).detach(), rtol=0, atol=0)
    # The slowest window is 0.01 ** (199 / 12 / 1.5) = 1e-22 there, and a sine network cannot outgrow its last layer.
    assert taps[:, 199].abs().max() < 1e-20 < taps[:, 0].abs().max()


@pytest.mark.parametrize("name", EVERY)
def test_state_size_and_caches_are_what_a_forward_leaves(name: str) -> None:
    config = RecurrentConfig(hidden_size=HIDDEN, layers=[{"mixer": EVERY[name]}])
    with torch.no_grad():
        _, state = run(layer(EVERY[name]), numbers(12))
    held = sum(t.numel() for n, t in state.items() if n.endswith("recurrent"))
    assert config.state_size() == held
    cached = sum(t.numel() for n, t in state.items() if n.endswith(".key") or n.endswith("value"))
    if name.startswith("hymba"):
        # A window of 5 leaves the 4 tokens that the next query still sees; accounting counts all of the window.
        cached += sum(t.numel() // 4 for n, t in state.items() if n in ("attention.key", "attention.value"))
    assert key_value_cache_size(config, 12) == cached
    if name in ("hyena", "base_conv_implicit"):
        assert average_key_value_cache_size(config, 12) == pytest.approx(cached / 2)


def test_retrieval_works_as_a_branch_and_inside_one() -> None:
    """The third branch looks up tokens, and the attention branch does too: single steps equal one pass."""
    retrieval = {"type": "retrieval", "chunk": 3, "top_k": 1, "encoder_dim": 4, "num_heads": 2, "head_dim": 4}
    third = retrieval | {"base": PLAIN["hyena"]}
    mixer = HYMBA | {"attention": retrieval | {"base": ATTENTION}, "third": third}
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(vocab_size=32, hidden_size=HIDDEN, layers=[{"mixer": mixer}])).double().eval()
    ids = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, state, pieces = model(ids), model.zero_state(2), []
        for part in ids.split([8, *[1] * 9], dim=1):
            out = model(part, past_key_values=state)
            state = out.past_key_values
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.logits, rtol=1e-10, atol=1e-10)


def test_init_info_and_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a description to a checkpoint whose loss one step lowers, through the real commands."""
    layers = [{"mixer": mixer, "mlp_size": 8} for mixer in EVERY.values()]
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"vocab_size": 258, "hidden_size": HIDDEN, "layers": layers}), encoding="utf-8")
    assert main(["init", str(path), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["info", str(tmp_path / "out"), "--json", "--context", "64"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["state_size"] == RecurrentConfig(hidden_size=HIDDEN, layers=layers).state_size() > 0
    # Kept at 64 tokens: two windows of 5 with 2 heads of 4, and every input of the implicit convolutions.
    assert facts["key_value_cache"]["numbers"] == 2 * 5 * 16 + 64 * (HIDDEN + 5 + 5)
    model = RecurrentLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    assert losses[1] < losses[0]
