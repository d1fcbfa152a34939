"""Expanded mixers against loops written from the paper's equations, and the rules of their descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.layers.descriptions.expansion import MOST, ExpansionConfig, default_rank
from longrecall.layers.expansion import EXPANDERS, build_expander
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

HIDDEN = 6
Array = NDArray[np.float64]
Weights = dict[str, Array]
ACTIVATION: dict[str, Callable[[Array], Array]] = {
    "silu": lambda z: z / (1 + np.exp(-z)),
    "relu": lambda z: np.maximum(z, 0),
    "1+elu": lambda z: np.where(z > 0, 1 + z, np.exp(z)),
    "identity": lambda z: z,
}
silu = ACTIVATION["silu"]


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def expanded(side: str, mixer: dict[str, Any], w: Weights, x: Array) -> Array:
    """Queries or keys of one token before the convolution, `[H, E * D]` (equations 8 and 9, and table 7)."""
    heads, width = mixer["num_heads"], mixer["key_dim"]
    y = (w[f"{side}_proj.weight"] @ x).reshape(heads, -1)
    expansion = mixer.get("expansion")
    if expansion is None or expansion["kind"] == "naive":
        return y
    factor, kind = expansion["factor"], expansion["kind"]
    a = ACTIVATION[expansion["activation"]](y)
    rows = []
    for h in range(heads):
        if kind == "headwise":
            made = a[h] @ w[f"{side}_expand.weight"][h]
            rows.append(np.concatenate([y[h], made]) if expansion["grafted"] else made)
        elif kind == "low_rank":
            inner = w[f"{side}_expand.down.weight"] @ a.reshape(-1)
            rows.append((w[f"{side}_expand.up.weight"] @ inner).reshape(heads, -1)[h])
        elif kind == "dpfp":
            r = np.maximum(np.concatenate([a[h], -a[h]]), 0)
            size = 2 * width
            rows.append(np.array([r[i] * r[(i + j) % size] for j in range(1, factor // 2 + 1) for i in range(size)]))
        else:
            weights = np.maximum(w[f"{side}_expand.proj.weight"] @ x, 0).reshape(heads, factor)[h]
            rows.append(np.concatenate([weights[j] * a[h] for j in range(factor)]))
    return np.stack(rows)


def convolved(channels: Array, taps: Array | None) -> Array:
    """Causal depthwise convolution of `[T, C]`, then SiLU; without taps the numbers as they are."""
    if taps is None:
        return channels
    width = taps.shape[1]
    past = np.concatenate([np.zeros((width - 1, channels.shape[1])), channels])
    return silu(
        np.stack([sum(past[t + i] * taps[:, i] for i in range(width)) for t in range(len(channels))])  # type: ignore[arg-type]
    )


def reference(mixer: dict[str, Any], w: Weights, x: Array) -> tuple[Array, Array]:
    """One sequence `[T, d]` -> outputs `[T, d]` and final states `[state heads, K, V]`, one number at a time."""
    kind, heads, value_dim = mixer["type"], mixer["num_heads"], mixer["value_dim"]
    value_heads = mixer.get("value_heads") or heads
    expansion = mixer.get("expansion") or {"factor": 1, "subheads": True}
    subheads = expansion["factor"] if expansion["subheads"] else 1
    delta = kind != "gla"
    q, k = (np.stack([expanded(side, mixer, w, token) for token in x]).reshape(len(x), -1) for side in "qk")
    v = x @ w["v_proj.weight"].T
    q, k, v = (convolved(z, w.get(f"{side}_conv.weight")) for side, z in (("q", q), ("k", k), ("v", v)))
    if delta and not mixer["conv_width"]:
        q, k, v = silu(q), silu(k), silu(v)
    width = q.shape[1] // (heads * subheads)
    q, k = q.reshape(len(x), heads, subheads, width), k.reshape(len(x), heads, subheads, width)
    if delta:
        q, k = (z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
    v = v.reshape(len(x), value_heads, value_dim)
    shared = value_heads // heads
    states = np.zeros((value_heads * subheads, width, value_dim))
    outputs = np.zeros((len(x), value_heads, value_dim))
    for t, token in enumerate(x):
        for hv in range(value_heads):
            for j in range(subheads):
                h = hv // shared
                s = (h * subheads + j) * shared + hv % shared
                decay, beta = gates(mixer, w, token, s, h * subheads + j, width)
                state = decay[:, None] * states[s]
                key, value = k[t, h, j], v[t, hv]
                written = beta * (value - key @ state) if delta else value
                states[s] = state + np.outer(key, written)
                scale = w["subhead_scale"][hv, j - 1] if expansion.get("grafted") and j else 1.0
                outputs[t, hv] += scale * (q[t, h, j] @ states[s]) / np.sqrt(width)
    normed = outputs / np.sqrt((outputs**2).mean(-1, keepdims=True) + mixer["norm_eps"]) * w["o_norm.weight"]
    if mixer["output_gate"]:
        normed *= silu(x @ w["g_proj.weight"].T).reshape(normed.shape)
    return normed.reshape(len(x), -1) @ w["o_proj.weight"].T, states


def gates(mixer: dict[str, Any], w: Weights, x: Array, s: int, key_head: int, width: int) -> tuple[Array, float]:
    """Decay per key channel and beta of state head `s`, which reads key (sub)head `key_head`."""
    if mixer["type"] == "gla":
        rows = slice(key_head * width, (key_head + 1) * width)
        gate = w["gk_proj.1.weight"][rows] @ (w["gk_proj.0.weight"] @ x) + w["gk_proj.1.bias"][rows]
        return sigmoid(gate) ** (1 / mixer["gate_divisor"]), 1.0
    beta = float(sigmoid(w["b_proj.weight"][s] @ x)) * (2 if mixer["negative_eigenvalues"] else 1)
    if mixer["type"] == "delta_net":
        return np.ones(width), beta
    step = np.log1p(np.exp(w["a_proj.weight"][s] @ x + w["dt_bias"][s]))
    return np.full(width, np.exp(-np.exp(w["A_log"][s]) * step)), beta


def check(description: dict[str, Any], length: int = 9, seed: int = 0) -> None:
    torch.manual_seed(seed)
    config = mixer_config(description)
    module = config.build(HIDDEN).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    x = torch.randn(1, length, HIDDEN, dtype=torch.float64)
    weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    # The loop knows no heads beyond num_heads: more heads are a mixer of their own, checked below.
    expected, states = reference(config.to_dict(), weights, x[0].numpy())
    position = torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        y, state = module(x, None, mask=None, position=position)
        first, between = module(x[:, :4], None, mask=None, position=position)
        rest, last = module(x[:, 4:], between, mask=None, position=position + 4)
    # float64 with outputs near 1: some hundred operations a number, in another order.
    assert np.abs(expected).max() > 0.1
    for found in (y, torch.cat([first, rest], 1)):
        np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-10)
    for found in (state["recurrent"], last["recurrent"]):
        np.testing.assert_allclose(found[0].numpy(), states, atol=1e-10)
    assert tuple(states.shape) == config.state_shapes()["recurrent"]


FAMILIES: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "num_heads": 2, "key_dim": 3, "value_dim": 4, "gate_rank": 2},
    "gla_conv": {"type": "gla", "num_heads": 2, "key_dim": 3, "value_dim": 4, "gate_rank": 2, "conv_width": 3},
    "delta_net": {"type": "delta_net", "num_heads": 2, "key_dim": 3, "value_dim": 4, "negative_eigenvalues": True},
    "gated_delta_net": {"type": "gated_delta_net", "num_heads": 2, "key_dim": 3, "value_dim": 4},
    "shared_keys": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 6, "key_dim": 3, "value_dim": 4}
    | {"conv_width": 0},
}
EXPANSIONS: dict[str, dict[str, Any]] = {
    "headwise": {"kind": "headwise", "factor": 3},
    "grafted": {"kind": "headwise", "factor": 3, "grafted": True},
    "whole": {"kind": "headwise", "factor": 3, "subheads": False},
    "relu": {"kind": "headwise", "factor": 2, "activation": "relu"},
    "1+elu": {"kind": "headwise", "factor": 2, "activation": "1+elu"},
    "identity": {"kind": "headwise", "factor": 2, "activation": "identity"},
    "low_rank": {"kind": "low_rank", "factor": 3, "rank": 2},
    "low_rank_whole": {"kind": "low_rank", "factor": 2, "subheads": False},
    "dpfp": {"kind": "dpfp", "factor": 4},
    "lfm": {"kind": "lfm", "factor": 3},
    "naive": {"kind": "naive", "factor": 3},
    "naive_whole": {"kind": "naive", "factor": 3, "subheads": False},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_layer_equals_the_equations(family: str, expansion: str) -> None:
    check(FAMILIES[family] | {"expansion": EXPANSIONS[expansion]})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loops_agree_with_the_plain_layer(family: str) -> None:
    check(FAMILIES[family])


@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    factor=st.integers(1, MOST),
    subheads=st.booleans(),
    heads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_factor(family: str, factor: int, subheads: bool, heads: int, seed: int) -> None:
    expansion = {"kind": "headwise", "factor": factor, "subheads": subheads}
    sizes = {"num_heads": heads} | ({"value_heads": 2 * heads} if family == "shared_keys" else {})
    check(FAMILIES[family] | sizes | {"expansion": expansion}, length=7, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_heads_are_the_plain_layer_with_more_heads(family: str) -> None:
    plain = FAMILIES[family]
    more = mixer_config(plain | {"expansion": {"kind": "heads", "factor": 3}})
    counts = {key: 3 * plain[key] for key in ("num_heads", "value_heads") if key in plain}
    expected = mixer_config(plain | counts)
    assert more.tensor_shapes(HIDDEN) == expected.tensor_shapes(HIDDEN)
    assert more.state_shapes() == expected.state_shapes()
    torch.manual_seed(0)
    one = more.build(HIDDEN)
    torch.manual_seed(0)
    other = expected.build(HIDDEN)
    x, position = torch.randn(2, 5, HIDDEN), torch.zeros(2, dtype=torch.long)
    assert torch.equal(*(m(x, None, mask=None, position=position)[0] for m in (one, other)))
    assert mixer_config(more.to_dict()) == more


@pytest.mark.parametrize("expansion", [name for name in EXPANSIONS if name not in ("headwise", "grafted")])
@pytest.mark.parametrize("family", ["gla_conv", "gated_delta_net"])
def test_alternatives_keep_the_contract_of_a_mixer(family: str, expansion: str) -> None:
    """Segments, padding and gradients; the main kinds go through all of tests/models/test_recurrent_lm.py."""
    torch.manual_seed(0)
    mixer = FAMILIES[family] | {"expansion": EXPANSIONS[expansion]}
    model = RecurrentLM(RecurrentConfig(hidden_size=16, layers=[{"mixer": mixer}] * 2, initializer_range=0.3))
    x = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    padded, mask = torch.cat([torch.full((2, 5), 257), x], 1), torch.ones(2, 29)
    mask[:, :5] = 0
    model.eval()
    with torch.no_grad():
        full = model(x).logits
        start = model(x[:, :11])
        rest = model(x[:, 11:], past_key_values=start.past_key_values).logits
        left = model(padded, attention_mask=mask).logits[:, 5:]
    # fp32 logits near 1 after two layers in another order of sums, as in test_recurrent_lm.py.
    assert (torch.cat([start.logits, rest], 1) - full).abs().max() < 1e-4
    assert (left - full).abs().max() < 1e-4
    model.train()(x, labels=x).loss.backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert dead == []


def count(kind: str, factor: int, heads: int, width: int, hidden: int) -> int:
    """Parameters that make the queries of one layer."""
    expansion = {"kind": kind, "factor": factor}
    mixer = {"type": "gated_delta_net", "num_heads": heads, "key_dim": width, "value_dim": 8, "expansion": expansion}
    shapes = mixer_config(mixer).tensor_shapes(hidden)
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if name.startswith(("q_proj", "q_expand")))


@pytest.mark.parametrize("factor", [1, 2, 8, 16])
def test_parameters_of_table_1(factor: int) -> None:
    # d_model = 1024 = H * d_qk, as in the paper's 400M models.
    heads, width, hidden = 8, 128, 1024
    assert count("naive", factor, heads, width, hidden) == hidden * width * heads * factor
    assert count("headwise", factor, heads, width, hidden) == hidden * width * (heads + factor)


@pytest.mark.parametrize("factor", [1, 2, 5, 16])
@pytest.mark.parametrize("width", [1, 3, 128])
def test_the_default_rank_is_the_largest_that_headwise_could_pay(width: int, factor: int) -> None:
    rank = default_rank(width, factor)
    assert rank * (1 + factor) <= factor * width or rank == 1
    assert (rank + 1) * (1 + factor) > factor * width


def test_descriptions_without_expansion_stay_as_they_were() -> None:
    for mixer in FAMILIES.values():
        assert "expansion" not in mixer_config(mixer).to_dict()
        assert mixer_config(mixer | {"expansion": None}) == mixer_config(mixer)


@pytest.mark.parametrize("name", EXPANSIONS)
def test_descriptions_round_trip(name: str) -> None:
    config = mixer_config(FAMILIES["gated_delta_net"] | {"expansion": EXPANSIONS[name]})
    assert mixer_config(config.to_dict()) == config
    assert set(EXPANSIONS[name].items()) <= set(config.to_dict()["expansion"].items())


def test_every_kind_is_covered() -> None:
    assert {expansion["kind"] for expansion in EXPANSIONS.values()} | {"heads"} == set(EXPANDERS)
    with pytest.raises(TypeError, match="more heads"):
        build_expander(ExpansionConfig("heads", 2), 2, 4, 8)


@pytest.mark.parametrize(
    ("expansion", "cause"),
    [
        ({"kind": "headwise", "factor": 0}, "whole number from 1 to 16, got 0"),
        ({"kind": "headwise", "factor": -2}, "from 1 to 16"),
        ({"kind": "headwise", "factor": 17}, "from 1 to 16"),
        ({"kind": "headwise", "factor": 2.0}, "whole number"),
        ({"kind": "headwise", "factor": True}, "whole number"),
        ({"kind": "headwize", "factor": 2}, 'Did you mean "headwise"'),
        ({"kind": "headwise"}, 'needs "factor"'),
        ({"factor": 2}, 'needs "kind"'),
        ({"kind": "headwise", "factor": 2, "activaton": "relu"}, 'Did you mean "activation"'),
        ({"kind": "headwise", "factor": 2, "activation": "gelu"}, "unknown activation"),
        ({"kind": "headwise", "factor": 2, "subheads": 1}, "true or false"),
        ({"kind": "headwise", "factor": 2, "rank": 4}, "rank belongs to"),
        ({"kind": "low_rank", "factor": 2, "rank": 0}, "positive whole number"),
        ({"kind": "dpfp", "factor": 3}, "2, 4, 6"),
        ({"kind": "naive", "factor": 2, "activation": "silu"}, "no place for an activation"),
        ({"kind": "heads", "factor": 2, "subheads": False}, "adds whole heads"),
        ({"kind": "headwise", "factor": 1, "grafted": True}, "at least 2 subheads"),
        ({"kind": "lfm", "factor": 2, "grafted": True}, "at least 2 subheads"),
        ("headwise", "must be a mapping"),
    ],
)
def test_bad_expansions_are_one_line_that_names_the_layer(expansion: Any, cause: str) -> None:
    layer = {"mixer": FAMILIES["gated_delta_net"] | {"expansion": expansion}}
    with pytest.raises(UserError, match=rf'layer 0: mixer "gated_delta_net": .*{cause}') as caught:
        RecurrentConfig(layers=[layer])
    assert "\n" not in str(caught.value)


def test_mixers_that_cannot_be_expanded() -> None:
    expansion = {"kind": "headwise", "factor": 2}
    with pytest.raises(UserError, match='"retnet" has no field "expansion"'):
        mixer_config({"type": "retnet", "num_heads": 2, "key_dim": 4, "value_dim": 4, "expansion": expansion})
    with pytest.raises(UserError, match="either merged or expanded"):
        mixer_config(FAMILIES["gla"] | {"merged": True, "expansion": expansion})
    with pytest.raises(UserError, match="must be a multiple"):
        mixer_config(FAMILIES["shared_keys"] | {"value_heads": 5, "expansion": expansion})
