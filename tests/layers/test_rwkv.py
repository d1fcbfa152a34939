"""RWKV-5 and RWKV-6 time mixing against the papers' formulas, written out token by token in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.mixers.rwkv import RWKV5, RWKV6, token_shift

D, H, K, V = 12, 3, 4, 5
SIZES = {"input_dim": D, "num_heads": H, "key_dim": K, "value_dim": V}
MIXERS: dict[str, dict[str, Any]] = {
    "rwkv5": {"type": "rwkv5", **SIZES},
    "rwkv6": {"type": "rwkv6", **SIZES, "mix_rank": 3, "decay_rank": 2},
}


def layer(name: str) -> RWKV5 | RWKV6:
    """A float64 layer in which nothing is small, nor the same in two places."""
    torch.manual_seed(0)
    mixer: RWKV5 | RWKV6 = mixer_config(MIXERS[name]).build(D).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return mixer


def inputs(length: int, seed: int = 1) -> Tensor:
    return torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_token(mixer: RWKV5 | RWKV6, x: Tensor, before: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sections 4.1.2 and 4.2.2 for one row: x, before ``[d]`` and the states ``[K, V]`` of its heads."""
    w = dict(mixer.named_parameters())
    if isinstance(mixer, RWKV6):
        mixed = x + (before - x) * w["mix_x"]
        down = w["mix_down.weight"].unflatten(0, (5, -1))
        shares = [w["mix"][n] + torch.tanh(mixed @ down[n].T) @ w["mix_up"][n] for n in range(5)]
        slow = x + (before - x) * shares[4]
        decay = w["decay"] + torch.tanh(slow @ w["decay_down.weight"].T) @ w["decay_up.weight"].T
    else:
        shares, decay = list(w["mix"]), w["decay"]
    r, k, v, gate = (
        (x + (before - x) * share) @ w[f"{name}_proj.weight"].T for name, share in zip("rkvg", shares, strict=False)
    )
    kept = torch.exp(-torch.exp(decay))
    outputs, after = [], []
    for h in range(H):
        keys, values = slice(h * K, h * K + K), slice(h * V, h * V + V)
        written = torch.outer(k[keys], v[values])
        o = r[keys] @ (states[h] + torch.diag(w["bonus"][h]) @ written)
        normed = (o - o.mean()) / torch.sqrt(o.var(correction=0) + mixer.config.norm_eps)
        outputs.append(F.silu(gate[values]) * (normed * w["o_norm.weight"][values] + w["o_norm.bias"][values]))
        after.append(torch.diag(kept[keys]) @ states[h] + written)
    return torch.cat(outputs) @ w["o_proj.weight"].T, after


def by_the_formulas(mixer: RWKV5 | RWKV6, x: Tensor, recurrent: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    rows, finals = [], []
    for row in range(x.shape[0]):
        before, states, outputs = shift[row, :, 0], list(recurrent[row]), []
        for token in x[row]:
            y, states = one_token(mixer, token, before, states)
            outputs.append(y)
            before = token
        rows.append(torch.stack(outputs))
        finals.append(torch.stack(states))
    return torch.stack(rows), torch.stack(finals)


@pytest.mark.parametrize("length", [1, 3, 40])
@pytest.mark.parametrize("name", MIXERS)
def test_it_computes_the_formulas_of_the_paper(name: str, length: int) -> None:
    mixer, x = layer(name), inputs(length)
    state = {
        "recurrent": torch.randn(2, H, K, V, dtype=torch.float64).requires_grad_(),
        "shift": torch.randn(2, D, 1, dtype=torch.float64).requires_grad_(),
    }
    found, after = mixer(x, state, mask=None, position=torch.zeros(2))
    expected, final = by_the_formulas(mixer, x, state["recurrent"], state["shift"])
    # float64 in another order of sums; norms of small heads enlarge it tenfold.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after["recurrent"], final, rtol=1e-10, atol=1e-10)
    assert torch.equal(after["shift"][..., 0], x[:, -1])
    leaves = [*state.values(), *mixer.parameters()]
    ours = torch.autograd.grad(found.sin().sum() + after["recurrent"].cos().sum(), leaves)
    theirs = torch.autograd.grad(expected.sin().sum() + final.cos().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert bool(b.abs().sum() > 0)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", MIXERS)
def test_a_fresh_layer_forgets_slowly_and_looks_back(name: str) -> None:
    mixer = mixer_config(MIXERS[name]).build(D)
    kept = torch.exp(-torch.exp(mixer.decay.detach()))
    # exp(-exp(-6)) to exp(-exp(-1)): a memory of 400 tokens in the slowest channel, of 3 in the fastest.
    assert float(kept.max()) == pytest.approx(0.99752, abs=1e-5)
    assert float(kept.min()) == pytest.approx(0.6922, abs=1e-4)
    assert bool((mixer.mix <= 1).all()) and bool((mixer.mix.diff(dim=1) < 0).all())
    assert 0.5 < float(mixer.bonus.detach().max()) < 0.61 and -0.11 < float(mixer.bonus.detach().min()) < 0
    again = mixer.bonus.detach().clone()
    with torch.no_grad():
        mixer.bonus.zero_()
    mixer.reset_parameters()
    assert torch.equal(mixer.bonus, again)


def test_token_shift_skips_padding() -> None:
    x = inputs(6)
    mask = torch.tensor([[False, True, True, False, True, False], [False] * 6])
    last = torch.randn(2, D, 1, dtype=torch.float64)
    before, after = token_shift(x, last, mask)
    expected = torch.stack([last[0, :, 0], x[0, 1], x[0, 2]])
    assert torch.equal(before[0, mask[0]], expected)
    assert torch.equal(after[0, :, 0], x[0, 4]) and torch.equal(after[1], last[1])
    plain, _ = token_shift(x, last, torch.ones_like(mask))
    assert torch.equal(plain, token_shift(x, last, None)[0])


def test_the_input_width_is_that_of_the_model() -> None:
    with pytest.raises(UserError, match=r'mixer "rwkv5": input_dim \(12\) must be the hidden_size of the model \(16\)'):
        mixer_config(MIXERS["rwkv5"]).build(16)
    with pytest.raises(UserError, match="decay_rank must be a positive whole number"):
        mixer_config(MIXERS["rwkv6"] | {"decay_rank": 0})
