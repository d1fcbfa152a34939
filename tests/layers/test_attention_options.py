"""Attention with any of its options: the formula in float64, one query after the other, and the same in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from longrecall.errors import UserError
from longrecall.layers import softmax_attention
from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.mixers.attention import Attention, why_no_kernels
from longrecall.layers.mixers.mla import MLA
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.stepping.step import Progress, StepSettings, step_of
from longrecall.layers.stepping.stream import Stream

D, LENGTH, ROWS, PADDED = 12, 17, 2, 4
# Sums of a few dozen float64 terms in another order.
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "max_position_embeddings": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 7}
LONGROPE |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}

ROTATIONS: list[dict[str, Any]] = [
    {},
    {"rotary_share": 0.0},
    {"rotary_share": 0.5, "rope_theta": 50.0},
    {"rope_scaling": YARN},
    {"rotary_share": 0.5, "rope_scaling": DYNAMIC | {"factor": 2.0}, "head_dim": 12},
    {"rotary_share": 0.5, "rope_scaling": LONGROPE},
]
OPTIONS: list[list[dict[str, Any]]] = [
    ROTATIONS,
    [{}, {"window": 5}, {"window": 40}],
    [{}, {"kv_heads": 2}, {"kv_heads": 1}],
    [{}, {"qk_norm": "head"}, {"qk_norm": "full"}, {"qk_norm": "head", "qk_norm_offset": 1.0, "qk_norm_eps": 0.1}],
    [{}, {"output_gate": True}],
    [{}, {"scale": 0.7, "key_multiplier": 1.4}],
    [{}, {"soft_cap": 1.5}],
    [{}, {"qkv_bias": True}, {"out_bias": True}],
    [{}, {"value_dim": 5}],
    [{}, {"meta_tokens": 3}],
]


def build(description: dict[str, Any], width: int = D) -> Any:
    """A layer in float64 whose every parameter is random, also where it begins at one or zero."""
    generator = torch.Generator().manual_seed(3)
    layer = mixer_config(description).build(width).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter + 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def text(width: int = D) -> tuple[Tensor, Tensor]:
    """Two rows, and their mask: the second begins with padding."""
    x = torch.randn(ROWS, LENGTH, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x, torch.arange(LENGTH) >= torch.tensor([[0], [PADDED]])


def radians(config: Any, position: int) -> list[float]:
    """Radians a token of every pair, for a token at this position, as the papers have them."""
    scaling, channels = config.rope_scaling, int(config.head_dim * config.rotary_share)
    theta = config.rope_theta
    if scaling and scaling.rope_type == "dynamic":
        most = scaling.max_position_embeddings
        longer = max(1.0, scaling.factor * max(position + 1, most) / most - (scaling.factor - 1))
        theta *= longer ** (channels / (channels - 2))
    found = [theta ** (-2 * i / channels) for i in range(channels // 2)]
    if scaling and scaling.rope_type == "longrope":
        long = position + 1 > scaling.original_max_position_embeddings
        by = scaling.long_factor if long else scaling.short_factor
        found = [x / factor for x, factor in zip(found, by, strict=True)]
    if scaling and scaling.rope_type == "yarn":
        found = list(config.rotation.radians()[0])
    return found


def turned(config: Any, x: Tensor, position: int) -> Tensor:
    """x ``[H, P]`` as complex numbers of its pairs, multiplied by a number on the circle."""
    speeds = torch.tensor(radians(config, position), dtype=torch.float64)
    pairs = len(speeds)
    circle = torch.polar(torch.full_like(speeds, config.rotation.magnitude if pairs else 1.0), position * speeds)
    both = torch.complex(x[:, :pairs].contiguous(), x[:, pairs : 2 * pairs].contiguous()) * circle
    return torch.cat([both.real, both.imag, x[:, 2 * pairs :]], dim=1)


def rms(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.qk_norm_eps).sqrt() * (weight + config.qk_norm_offset)


def read_row(m: Any, x: Tensor) -> Tensor:
    """One row of real tokens ``[T, d]``, query by query and head by head."""
    config = m.config
    heads, groups, width, values = config.num_heads, config.kv_heads, config.head_dim, config.value_width
    past: list[tuple[Tensor, Tensor]] = []
    rows = []
    for position, token in enumerate(x):
        q, k, v = (
            proj.weight @ token + (0 if proj.bias is None else proj.bias) for proj in (m.q_proj, m.k_proj, m.v_proj)
        )
        q, k, v = q.view(heads, -1), k.view(groups, width), v.view(groups, values)
        q, gate = q[:, :width], q[:, width:]
        if config.qk_norm == "full":
            q = rms(q.flatten(), m.q_norm.weight, config).view(heads, width)
            k = rms(k.flatten(), m.k_norm.weight, config).view(groups, width)
        elif config.qk_norm:
            q, k = rms(q, m.q_norm.weight, config), rms(k, m.k_norm.weight, config)
        q, k = turned(config, q, position), turned(config, k, position)
        past.append((k, v))
        seen = past[-config.window :] if config.window else past
        own = [
            (turned(config, m.meta_key[i], i - config.meta_tokens), m.meta_value[i]) for i in range(config.meta_tokens)
        ]
        found = []
        for head in range(heads):
            group = head * groups // heads
            scores = torch.stack([q[head] @ (config.key_multiplier * key[group]) for key, _ in own + seen])
            scores = scores * (width**-0.5 if config.scale is None else config.scale)
            scores = scores if config.soft_cap is None else config.soft_cap * torch.tanh(scores / config.soft_cap)
            mean = scores.softmax(0) @ torch.stack([value[group] for _, value in own + seen])
            found.append(mean / (1 + torch.exp(-gate[head])) if config.output_gate else mean)
        rows.append(m.o_proj(torch.cat(found)))
    return torch.stack(rows)


def decode(layer: Any, x: Tensor, state: dict[str, Tensor], position: Tensor, fused: bool = False) -> Tensor:
    """Tokens ``[B, T, d]`` one by one through the layer's decoding step, from a state on."""
    embeddings = nn.Embedding(1, D, dtype=x.dtype)
    stepping = StepSettings(len(x), LENGTH + 3, fused, x.dtype, torch.float32, embeddings)
    step = step_of(layer.config, layer, stepping)
    buffers = step.allocate()
    step.clear(buffers)
    step.load(buffers, state, position)
    shapes, outputs, position = {n: t.shape for n, t in buffers.items()}, [], position.clone()
    for token in x.unbind(1):
        stream = Stream(token.clone(), x.dtype)
        step(stream, None, buffers, position)
        outputs.append(stream.x - token)
        position += 1
    assert {n: t.shape for n, t in buffers.items()} == shapes
    after = step.export(buffers, Progress(x.shape[1], 0, position))
    assert after.keys() == state.keys()
    return torch.stack(outputs, dim=1)


def check_pieces(layer: Any, x: Tensor, mask: Tensor, whole: Tensor) -> None:
    """A prompt, a piece and single tokens give what one pass gives; padding leaves nothing behind."""
    first, second = 7, 4
    zero = torch.zeros(ROWS, dtype=torch.long)
    y, state = layer(x[:, :first], None, mask=mask[:, :first], position=zero)
    read = mask[:, :first].sum(1)
    more, state = layer(x[:, first : first + second], state, mask=None, position=read)
    one, _ = layer(x[:, first + second :][:, :1], state, mask=None, position=read + second)
    rest = decode(layer, x[:, first + second :], state, read + second)
    torch.testing.assert_close(torch.cat([y, more, rest], dim=1)[mask], whole[mask], **CLOSE)
    torch.testing.assert_close(one, rest[:, :1], **CLOSE)
    alone, _ = layer(x[1:, PADDED:], None, mask=None, position=zero[1:])
    torch.testing.assert_close(alone[0], whole[1, PADDED:], **CLOSE)


@given(st.tuples(*(st.sampled_from(choices) for choices in OPTIONS)))
@settings(max_examples=40, deadline=None, derandomize=True)
@torch.no_grad()
def test_any_options_together(chosen: tuple[dict[str, Any], ...]) -> None:
    description: dict[str, Any] = {"type": "attention", "num_heads": 4, "head_dim": 8}
    for choice in chosen:
        description |= choice
    layer = build(description)
    x, mask = text()
    whole, _ = layer(x, None, mask=mask, position=torch.zeros(ROWS, dtype=torch.long))
    for row in range(ROWS):
        torch.testing.assert_close(whole[row][mask[row]], read_row(layer, x[row][mask[row]]), **CLOSE)
    check_pieces(layer, x, mask, whole)


LATENT = {"type": "mla", "num_heads": 3, "kv_rank": 7, "nope_dim": 4, "rope_dim": 4, "value_dim": 5}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": False, "q_rank": 6, "bias": True},
        {"rope_dim": 0},
        {"rope_scaling": DYNAMIC, "interleaved": False},
    ],
)
@torch.no_grad()
def test_latent_attention_in_pieces(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x, mask) = build(LATENT | options), text()
    zero = torch.zeros(ROWS, dtype=torch.long)
    whole, cache = layer(x, None, mask=mask, position=zero)
    assert cache.keys() == {"latent", "position"} and cache["latent"].shape == (ROWS, LENGTH, 7 + layer.config.rope_dim)
    check_pieces(layer, x, mask, whole)
    for absorbed in (True, False):
        monkeypatch.setattr(MLA, "absorbs", lambda *_, absorbed=absorbed: absorbed)
        torch.testing.assert_close(layer(x, None, mask=mask, position=zero)[0], whole, **CLOSE)
        check_pieces(layer, x, mask, whole)


def test_one_query_is_absorbed_and_adapters_are_not_passed_over() -> None:
    layer = build(LATENT | {"kv_rank": 512, "nope_dim": 128, "value_dim": 128, "num_heads": 1})
    assert layer.absorbs(1, 1) and layer.absorbs(1, 10**6) and layer.absorbs(100, 10**6)
    assert not layer.absorbs(10**4, 10**4)
    layer.kv_b_proj = nn.Sequential(layer.kv_b_proj, nn.Identity())
    assert not layer.absorbs(1, 1)


def test_gradients_are_those_of_the_formula() -> None:
    """Finite differences through every option at once, and through both forms of latent attention."""
    options = {"kv_heads": 1, "qk_norm": "head", "output_gate": True, "soft_cap": 2.0, "window": 3, "value_dim": 3}
    one = build(
        {"type": "attention", "num_heads": 2, "head_dim": 4, "rotary_share": 0.5, "meta_tokens": 1} | options, 4
    )
    two = build(LATENT | {"kv_rank": 2, "num_heads": 2}, 4)
    x = torch.randn(1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    zero = torch.zeros(1, dtype=torch.long)
    for layer in (one, two):
        assert torch.autograd.gradcheck(lambda x, layer=layer: layer(x, None, mask=None, position=zero)[0], x)
        layer(x, None, mask=None, position=zero)[0].sum().backward()
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


@torch.no_grad()
def test_blocks_leave_out_what_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = text()
    zero = torch.zeros(ROWS, dtype=torch.long)
    for options in ({"window": 5}, {"soft_cap": 2.0}, {"window": 3, "meta_tokens": 2}):
        layer = build({"type": "attention", "num_heads": 4, "head_dim": 8} | options)
        expected, _ = layer(x, None, mask=torch.ones_like(mask), position=zero)
        monkeypatch.setattr(softmax_attention, "QUERY_BLOCK", 6)
        torch.testing.assert_close(layer(x, None, mask=None, position=zero)[0], expected, **CLOSE)
        monkeypatch.undo()


@torch.no_grad()
def test_a_wider_input() -> None:
    layer, (x, _) = build({"type": "attention", "num_heads": 2, "head_dim": 4, "input_size": 2 * D}), text(2 * D)
    y, _ = layer(x, None, mask=None, position=torch.zeros(ROWS, dtype=torch.long))
    assert y.shape == (ROWS, LENGTH, D)
    torch.testing.assert_close(y[0], read_row(layer, x[0]), **CLOSE)


def test_why_a_step_is_in_plain_torch() -> None:
    def reason(**options: Any) -> str | None:
        return why_no_kernels(build({"type": "attention", "num_heads": 4, "head_dim": 8} | options).float())

    assert reason(value_dim=5) == "values are as wide as keys (8) there; got 5"
    assert reason(rope_scaling=DYNAMIC) == 'the angles of rope_type "dynamic" depend on the position'


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"qk_norm": "heads"}, 'qk_norm "heads" is none of head, full. Did you mean "head"?'),
    ({"qk_norm_offset": 0.5}, "qk_norm_offset must be 0 or 1, got 0.5"),
    ({"rotary_share": 1.5}, "rotary_share must be from 0 to 1, got 1.5"),
    ({"value_dim": 0}, "value_dim must be a positive whole number, got 0"),
    ({"input_size": True}, "input_size must be a positive whole number, got True"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        mixer_config({"type": "attention", "num_heads": 2, "head_dim": 4} | options)
    assert message in str(caught.value)


def test_a_description_without_options_is_what_it_was() -> None:
    """Configs and fingerprints of older models stay."""
    old = {"type": "attention", "num_heads": 2, "head_dim": 4, "kv_heads": 2, "window": None, "rope_theta": 10000.0}
    config: MixerConfig = mixer_config(old)
    assert config.to_dict() == old | {"qkv_bias": False}
    assert config.caches() == [(16, None)] and mixer_config(old | {"value_dim": 3, "window": 7}).caches() == [(14, 7)]
    assert mixer_config(LATENT).caches() == [(11, None)] and mixer_config(LATENT).grows
    assert isinstance(config.build(8), Attention)
