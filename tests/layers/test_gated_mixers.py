"""HGRN2, Kimi Delta Attention and RWKV-7 against their formulas, token by token in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.layers.mixers.hgrn2 import forget_gate
from longrecall.layers.mixers.registry import mixer_config

D, LENGTH = 12, 37
HGRN2 = {"type": "hgrn2", "num_heads": 3, "key_dim": 4, "value_dim": 5}
KDA = {"type": "kda", "num_heads": 3, "key_dim": 4, "value_dim": 5}
RWKV7 = {"type": "rwkv7", "input_dim": D, "num_heads": 3, "key_dim": 4, "value_dim": 5}
RWKV7 |= {"decay_rank": 2, "rate_rank": 3, "gate_rank": 5}
# Sums of a few hundred float64 terms in another order.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def build(description: dict) -> tuple[nn.Module, Tensor]:
    """A mixer in float64 whose every parameter is random, also where it begins at one or zero, and its input."""
    generator = torch.Generator().manual_seed(3)
    mixer = mixer_config(description).build(D).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(parameter + 0.5 * torch.randn(parameter.shape, generator=generator))
    return mixer, torch.randn(2, LENGTH, D, generator=generator, dtype=torch.float64)


def convolved(x: Tensor, conv: nn.Module | None) -> Tensor:
    """SiLU of the sum over the last taps, one time step after the other."""
    if conv is None:
        return x
    width, result = conv.weight.shape[1], torch.zeros_like(x)
    for t in range(x.shape[1]):
        for tap in range(width):
            if t - tap >= 0:
                result[:, t] += conv.weight[:, width - 1 - tap] * x[:, t - tap]
    return F.silu(result)


def heads(x: Tensor, count: int = 3) -> Tensor:
    return x.reshape(*x.shape[:-1], count, -1)


def rms(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def read_hgrn2(m: nn.Module, x: Tensor, bound: float) -> Tensor:
    q, f, i = (convolved(x @ getattr(m, f"{n}_proj").weight.T, getattr(m, f"{n}_conv")) for n in "qfi")
    q = heads(q if m.q_conv else F.silu(q))
    forget, i = heads(bound + (1 - bound) / (1 + torch.exp(-f))), heads(i)
    state, rows = torch.zeros(2, 3, 4, 5, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = torch.einsum("bhk,bhkv->bhkv", forget[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", 1 - forget[:, t], i[:, t])
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state).flatten(1) / 2)
    return (rms(torch.stack(rows, 1)) * m.o_norm.weight) @ m.o_proj.weight.T


def read_kda(m: nn.Module, x: Tensor, beta_factor: float) -> Tensor:
    q, k, v = (x @ getattr(m, f"{n}_proj").weight.T for n in "qkv")
    if m.q_conv is None:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    else:
        q, k, v = convolved(q, m.q_conv), convolved(k, m.k_conv), convolved(v, m.v_conv)
    q, k, v = heads(q), heads(k), heads(v)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    raw = x @ m.f_proj[0].weight.T @ m.f_proj[1].weight.T + m.dt_bias
    alpha = torch.exp(-m.A_log.exp()[:, None] * heads(torch.log(1 + torch.exp(raw))))
    beta = beta_factor / (1 + torch.exp(-x @ m.b_proj.weight.T))
    gate = 1 / (1 + torch.exp(-(x @ m.g_proj[0].weight.T @ m.g_proj[1].weight.T + m.g_proj[1].bias)))
    state, rows = torch.zeros(2, 3, 4, 5, dtype=x.dtype), []
    for t in range(x.shape[1]):
        decay = torch.diag_embed(alpha[:, t])
        erase = torch.eye(4, dtype=x.dtype) - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
        state = erase @ decay @ state + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append((q[:, t, :, None] @ state)[:, :, 0] / 2)
    return ((rms(torch.stack(rows, 1)) * m.o_norm.weight).flatten(-2) * gate) @ m.o_proj.weight.T


def read_rwkv7(m: nn.Module, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    xr, xw, xk, xv, xa, xg = (x * (1 - share) + before * share for share in m.mix)
    r, k, v = xr @ m.r_proj.weight.T, xk @ m.k_proj.weight.T, heads(xv @ m.v_proj.weight.T)
    raw = m.decay + torch.tanh(xw @ m.decay_down.weight.T) @ m.decay_up.weight.T
    # As the authors write it: w = exp(-exp(-softplus(-raw) - 1/2)).
    w = heads(torch.exp(-torch.exp(-torch.log(1 + torch.exp(-raw)) - 0.5)))
    a = 1 / (1 + torch.exp(-(m.rate + xa @ m.rate_down.weight.T @ m.rate_up.weight.T)))
    gate = (1 / (1 + torch.exp(-xg @ m.gate_down.weight.T))) @ m.gate_up.weight.T
    kappa = heads(k * m.removal_scale)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    written, r, a = heads(k * (1 + (a - 1) * m.rate_scale)), heads(r), heads(a)
    state, rows = torch.zeros(2, 3, 5, 4, dtype=x.dtype), []
    for t in range(x.shape[1]):
        # The paper's own layout: values in rows, keys in columns, the transition from the right.
        transition = torch.diag_embed(w[:, t]) - kappa[:, t, :, :, None] * (a[:, t] * kappa[:, t])[:, :, None, :]
        state = state @ transition + v[:, t, :, :, None] * written[:, t, :, None, :]
        o = (state @ r[:, t, :, :, None])[..., 0]
        o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, unbiased=False, keepdim=True) + 64e-5).sqrt()
        bonus = (r[:, t] * m.bonus * written[:, t]).sum(-1, keepdim=True) * v[:, t]
        rows.append(o.flatten(1) * m.o_norm.weight + m.o_norm.bias + bonus.flatten(1))
    return (torch.stack(rows, 1) * gate) @ m.o_proj.weight.T


CASES: dict[str, tuple[dict, Callable[[nn.Module, Tensor], Tensor]]] = {
    "hgrn2": (HGRN2, lambda m, x: read_hgrn2(m, x, 0.0)),
    "hgrn2_bound": ({**HGRN2, "lower_bound": 0.7, "conv_width": 3}, lambda m, x: read_hgrn2(m, x, 0.7)),
    "kda": (KDA, lambda m, x: read_kda(m, x, 1.0)),
    "kda_plain": (
        {**KDA, "conv_width": 0, "gate_rank": 2, "negative_eigenvalues": True},
        lambda m, x: read_kda(m, x, 2.0),
    ),
    "rwkv7": (RWKV7, read_rwkv7),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_its_formula(name: str) -> None:
    description, read = CASES[name]
    mixer, x = build(description)
    with torch.no_grad():
        found, _ = mixer(x, None, mask=None, position=torch.zeros(2, dtype=torch.long))
        torch.testing.assert_close(found, read(mixer, x), **CLOSE)


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), cut=st.integers(1, LENGTH - 1), data=st.data())
def test_any_split_and_any_padding_give_the_same(name: str, cut: int, data: st.DataObject) -> None:
    """Exact in float64, where the contract over all mixers allows float32 its roundings."""
    mixer, x = build(CASES[name][0])
    zero = torch.zeros(2, dtype=torch.long)
    real = torch.tensor(data.draw(st.permutations([True] * LENGTH + [False] * 9)))
    spread, mask = torch.full((2, LENGTH + 9, D), 7.0, dtype=x.dtype), real.expand(2, -1)
    spread[:, real] = x
    with torch.no_grad():
        whole, final = mixer(x, None, mask=None, position=zero)
        first, state = mixer(x[:, :cut], None, mask=None, position=zero)
        second, state = mixer(x[:, cut:], state, mask=None, position=zero + cut)
        padded, padded_state = mixer(spread, None, mask=mask, position=zero)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **CLOSE)
    torch.testing.assert_close(padded[:, real], whole, **CLOSE)
    for key, tensor in final.items():
        torch.testing.assert_close(state[key], tensor, **CLOSE)
        torch.testing.assert_close(padded_state[key], tensor, **CLOSE)


def test_a_forget_gate_keeps_its_digits_at_both_ends() -> None:
    raw = torch.tensor([-80.0, -20.0, 0.0, 20.0, 80.0])
    for bound in (0.0, 1e-3, 0.9):
        log_forget, key = forget_gate(raw, bound)
        wide = raw.double()
        expected = torch.log(bound + (1 - bound) * torch.sigmoid(wide))
        # One float32 rounding of a number and one of each function on the way.
        torch.testing.assert_close(log_forget.double(), expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(key.double(), (1 - bound) * torch.sigmoid(-wide), rtol=1e-6, atol=0)


def test_a_lower_bound_makes_the_memory_longer() -> None:
    x = torch.randn(1, 40, D, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    mixers = [mixer_config({**HGRN2, "lower_bound": bound}).build(D) for bound in (0.0, 0.95)]
    mixers[1].load_state_dict(mixers[0].state_dict())
    kept = []
    for mixer in mixers:
        state = {"recurrent": torch.ones(1, 3, 4, 5)}
        zero = {"recurrent": torch.zeros(1, 3, 4, 5)}
        after = [mixer(x, s, mask=None, position=torch.zeros(1))[1]["recurrent"] for s in (state, zero)]
        kept.append(float((after[0] - after[1]).detach().min()))
    # The least that is left after 40 tokens: 0.95 ** 40 = 0.128.
    assert kept[0] < 1e-6 and kept[1] >= 0.128


def test_sensible_beginnings() -> None:
    torch.manual_seed(0)
    kda, rwkv7 = mixer_config({**KDA, "num_heads": 8, "key_dim": 32}).build(D), mixer_config(RWKV7).build(D)
    x = torch.zeros(1, 1, D)
    decay = kda.log_decay(x).detach()
    # A in (1, 16) times a step of 0.001 to 0.1.
    assert -1.6001 <= float(decay.min()) < -0.1 and -0.02 < float(decay.max()) <= -0.00099
    step = -math.exp(-0.5) * rwkv7.decay.detach().sigmoid()
    assert float(step.min()) == pytest.approx(-0.1106, abs=1e-3) and float(step.max()) == pytest.approx(-9e-4, abs=1e-4)
    assert bool((rwkv7.mix[:, 0] == 1).all()) and bool((rwkv7.mix.diff(dim=1) < 0).all())


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({**HGRN2, "lower_bound": 1.0}, "lower_bound must be a number from 0"),
        ({**HGRN2, "lower_bound": True}, "lower_bound must be a number from 0"),
        ({**HGRN2, "key_dim": 0}, "key_dim must be a positive whole number"),
        ({**KDA, "gate_rank": 0}, "gate_rank must be a positive whole number"),
        ({**KDA, "gate_divisor": 16}, 'no field "gate_divisor"'),
        ({**RWKV7, "decay_rank": -1}, "decay_rank must be a positive whole number"),
    ],
)
def test_descriptions_that_cannot_be(description: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixer_config(description)


def test_a_width_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(UserError, match=r"input_dim \(12\) must be the hidden_size of the model \(16\)"):
        mixer_config(RWKV7).build(16)


def test_init_and_info_know_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [{"mixer": mixer, "mlp_size": 8} for mixer in (HGRN2, KDA, RWKV7)]
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"vocab_size": 258, "hidden_size": D, "layers": layers}))
    assert main(["init", str(path), str(tmp_path / "fresh")]) == 0
    capsys.readouterr()
    assert main(["info", str(tmp_path / "fresh")]) == 0
    text = capsys.readouterr().out
    for words in ("hgrn2", "kda", "rwkv7", "num_heads=3 key_dim=4 value_dim=5"):
        assert words in text
    assert main(["generate", str(tmp_path / "fresh"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
