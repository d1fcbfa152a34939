"""What every mixer of RG-LRU, RWKV, HGRN2, KDA, MoM and Gated DeltaProduct promises, and that it computes its formula.

Recurrences are written out here token by token, from the papers and from what flash-linear-attention's layers compute,
which cannot run on a CPU. RG-LRU and RWKV-4 are compared with transformers' own layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock
from transformers.models.rwkv.configuration_rwkv import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward, RwkvSelfAttention

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

D = 12
HEADS = {"num_heads": 2, "key_dim": 4, "value_dim": 6}
OF_RWKV7 = {"type": "rwkv7", "input_dim": D, "num_heads": 3, "key_dim": 4, "value_dim": 4, "decay_rank": 2} | {
    "rate_rank": 3,
    "gate_rank": 5,
}
CASES: dict[str, dict[str, Any]] = {
    "rg_lru": {"type": "rg_lru", "inner_dim": 10, "num_heads": 2},
    "rg_lru_one_head": {"type": "rg_lru", "inner_dim": 12, "num_heads": 1, "conv_width": 3, "activation": "silu"},
    "rwkv4": {"type": "rwkv4", "input_dim": D, "inner_dim": 10},
    "rwkv4_channel": {"type": "rwkv4_channel", "input_dim": D, "inner_dim": 20},
    "rwkv6_channel": {"type": "rwkv6_channel", "input_dim": D, "inner_dim": 20},
    "rwkv7_channel": {"type": "rwkv7_channel", "input_dim": D, "inner_dim": 20},
    "rwkv7_gives": OF_RWKV7 | {"gives_values": True},
    "rwkv7_takes": OF_RWKV7 | {"value_rank": 2},
    "hgrn2_bounds": {"type": "hgrn2", **HEADS, "bound_rows": 3, "bound_row": 2, "conv_width": 4}
    | {"conv_activation": None},
    "hgrn2_takes": {"type": "hgrn2", **HEADS, "bound_row": 1},
    "kda_value_heads": {"type": "kda", **HEADS, "value_heads": 4, "decay_floor": -5.0},
    "mom_tied": {"type": "mom", **HEADS, "memories": 3, "tied": True},
    "mom_tied_all": {"type": "mom", **HEADS, "memories": 4, "active": 1, "shared": False, "tied": True}
    | {"tied_projections": True, "output_gate": False},
    "gated_delta_product": {"type": "gated_delta_product", **HEADS},
    "gated_delta_product_values": {"type": "gated_delta_product", **HEADS, "value_heads": 4, "steps": 3}
    | {"decay": False, "conv_width": 0, "output_gate": False, "negative_eigenvalues": False},
}
EVERY = pytest.mark.parametrize("name", CASES)


def layer(name: str) -> Any:
    """A float64 layer in which nothing is small, nor the same in two places."""
    torch.manual_seed(0)
    mixer = mixer_config(CASES[name]).build(D).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return mixer


def inputs(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def taken(mixer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What earlier layers gave."""
    g, config = torch.Generator().manual_seed(2), mixer.config
    made = {}
    if "first_value" in config.takes:
        made["first_value"] = torch.randn(*x.shape[:2], 12, generator=g, dtype=x.dtype)
    if "lower_bounds" in config.takes:
        made["lower_bounds"] = torch.rand(3, 8, generator=g, dtype=x.dtype)
    return made


def run(
    mixer: nn.Module, x: Tensor, state: Any = None, mask: Tensor | None = None, start: int = 0, **given: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    position = torch.full((x.shape[0],), start)
    y, after = mixer(x, state, mask=mask, position=position, **given)
    return y, {name: tensor for name, tensor in after.items() if not name.startswith("carried.")}


@EVERY
def test_a_description_says_what_the_layer_holds(name: str) -> None:
    config = mixer_config(CASES[name])
    mixer = config.build(D)
    held = [(key, tuple(tensor.shape)) for key, tensor in mixer.state_dict().items()]
    assert list(config.tensor_shapes(D).items()) == held
    assert mixer_config(config.to_dict()) == config
    x = inputs(3).float()
    _, state = run(mixer.eval(), x, **taken(mixer, x))
    assert {key: tuple(tensor.shape[1:]) for key, tensor in state.items()} == config.state_shapes()


@EVERY
def test_a_prompt_and_steps_equal_one_pass(name: str) -> None:
    mixer, x = layer(name), inputs(11)
    given = taken(mixer, x)

    def part(start: int, end: int, state: Any) -> tuple[Tensor, dict[str, Tensor]]:
        own = {key: t[:, start:end] if key == "first_value" else t for key, t in given.items()}
        return run(mixer, x[:, start:end], state, start=start, **own)

    whole, final = part(0, 11, None)
    y, state = part(0, 6, mixer_config(CASES[name]).zero_state(2, x.device, x.dtype))
    outputs = [y]
    for t in range(6, 11):
        y, state = part(t, t + 1, state)
        outputs.append(y)
    # float64, the same sums in another order.
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-10, atol=1e-10)
    for key, tensor in final.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-10)


@EVERY
def test_padding_leaves_no_trace(name: str) -> None:
    mixer, x = layer(name), inputs(9)
    given = taken(mixer, x)
    mask = torch.tensor([[False, False, True, True, False, True, True, True, False], [False] * 9])
    start = {key: torch.randn_like(tensor) for key, tensor in run(mixer, x, **given)[1].items()}
    if name == "rwkv4":
        start["recurrent"][:, :, 2] = 1
    y, after = run(mixer, x.masked_fill(~mask[..., None], 3.0), start, mask, 4, **given)
    own = {key: tensor[:1, mask[0]] if key == "first_value" else tensor for key, tensor in given.items()}
    expected, final = run(mixer, x[:1, mask[0]], {key: t[:1] for key, t in start.items()}, None, 4, **own)
    # float64, the same sums in another order.
    torch.testing.assert_close(y[:1, mask[0]], expected, rtol=1e-10, atol=1e-10)
    for key, tensor in final.items():
        torch.testing.assert_close(after[key][:1], tensor, rtol=1e-10, atol=1e-10)
        assert torch.equal(after[key][1], start[key][1])


@EVERY
def test_every_parameter_learns_also_in_low_precision(name: str) -> None:
    mixer = mixer_config(CASES[name]).build(D)
    x = inputs(20).float()
    y, _ = run(mixer, x, **taken(mixer, x))
    y.square().sum().backward()
    unused = {"router.weight"} if name == "mom_tied_all" else set()
    for key, parameter in mixer.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())
        assert bool(parameter.grad.any()) or key in unused, key
    low = mixer.bfloat16()
    y, state = run(low, x.bfloat16(), **taken(low, x.bfloat16()))
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())
    assert all(t.dtype == torch.float32 for key, t in state.items() if key == "recurrent")


def test_a_model_of_all_of_them_generates_and_reads_padding() -> None:
    torch.manual_seed(0)
    names = ("rg_lru", "rwkv4", "rwkv4_channel", "rwkv6_channel", "gated_delta_product", "kda_value_heads", "mom_tied")
    layers = [{"mixer": CASES[name], "mlp_size": 0} for name in names]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=D, layers=layers)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :5])
        second = model(ids[:, 5:], past_key_values=first.past_key_values).logits
        # float64 through seven layers.
        torch.testing.assert_close(torch.cat([first.logits, second], 1), whole, rtol=1e-8, atol=1e-8)
        padded, mask = F.pad(ids, (3, 0)), F.pad(torch.ones_like(ids), (3, 0))
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], whole, rtol=1e-8, atol=1e-8)
        packed = model(ids.reshape(1, -1), cu_seqlens=torch.tensor([0, 9, 18])).logits
        torch.testing.assert_close(packed.view_as(whole), whole, rtol=1e-8, atol=1e-8)
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
        expected = ids
        for _ in range(4):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)


GEMMA = {"vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("heads", "width", "taps", "activation"),
    [(2, 10, 4, "gelu_pytorch_tanh"), (3, 12, 2, "gelu"), (1, 8, 4, "silu")],
)
def test_rg_lru_is_that_of_transformers(heads: int, width: int, taps: int, activation: str) -> None:
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        hidden_size=D,
        num_attention_heads=heads,
        lru_width=width,
        conv1d_width=taps,
        hidden_activation=activation,
        **GEMMA,
    )
    theirs = RecurrentGemmaRecurrentBlock(config, 0).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    ours = mixer_config(
        {"type": "rg_lru", "inner_dim": width, "num_heads": heads, "conv_width": taps}
        | {"activation": activation.replace("pytorch_", "")}
    ).build(D)
    names = {"linear_x": "in_proj", "linear_y": "gate_proj", "linear_out": "out_proj", "conv_1d": "conv"} | {
        "rg_lru.recurrent_param": "decay",
        "rg_lru.recurrent_gate_": "decay_gate_",
        "rg_lru.input_gate_": "input_gate_",
    }
    held = {}
    for key, tensor in theirs.state_dict().items():
        found = next(foreign for foreign in names if key.startswith(foreign))
        held[names[found] + key.removeprefix(found)] = tensor.squeeze(1) if key == "conv_1d.weight" else tensor
    ours.load_state_dict(held)
    x = inputs(30).float()
    with torch.no_grad():
        expected, _ = theirs(x, torch.arange(30)[None].expand(2, -1), None, use_cache=False)
        found, _ = ours(x, None, mask=None, position=torch.zeros(2, dtype=torch.long))
    # float32; theirs loses digits of 1 - a^2 where a is near 1.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rg_lru_writes_the_first_token_whole_and_no_gradient_is_infinite() -> None:
    mixer = layer("rg_lru").requires_grad_(True)
    with torch.no_grad():
        # A closed gate: nothing decays, and the root is taken of 0.
        mixer.decay_gate_bias.fill_(-2000.0)
    x = inputs(5)
    written, log_decay = mixer.gates(x[..., :10], torch.tensor([True, False, False, False, False]).expand(2, -1))
    assert bool((log_decay == 0).all())
    assert bool((written[:, 1:] == 0).all()) and bool((written[:, 0] != 0).all())
    y, _ = run(mixer, x)
    y.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in mixer.parameters())


@pytest.mark.parametrize("inner", [D, 20])
def test_rwkv4_is_that_of_transformers(inner: int) -> None:
    torch.manual_seed(0)
    config = RwkvConfig(hidden_size=D, attention_hidden_size=inner, intermediate_size=28, num_hidden_layers=2)
    pairs: list[tuple[nn.Module, dict[str, Any], dict[str, str]]] = [
        (
            RwkvSelfAttention(config),
            {"type": "rwkv4", "inner_dim": inner},
            {"time_decay": "decay", "time_first": "bonus"},
        ),
        (RwkvFeedForward(config), {"type": "rwkv4_channel", "inner_dim": 28}, {}),
    ]
    short = {"key": "k", "value": "v", "receptance": "r", "output": "o"}
    for theirs, description, names in pairs:
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_()
        ours = mixer_config(description | {"input_dim": D}).build(D)
        for foreign, letter in short.items():
            names |= {f"time_mix_{foreign}": f"mix_{letter}", f"{foreign}.weight": f"{letter}_proj.weight"}
        ours.load_state_dict({names[key]: tensor.squeeze() for key, tensor in theirs.state_dict().items()})
        x = inputs(40).float()
        with torch.no_grad():
            found, _ = ours(x, None, mask=None, position=torch.zeros(2, dtype=torch.long))
            # float32, averages by another recurrence.
            torch.testing.assert_close(found, theirs(x)[0], rtol=1e-5, atol=1e-4)


def shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1)) - x


def test_channel_mixing_of_later_families() -> None:
    for name in ("rwkv6_channel", "rwkv7_channel"):
        mixer, x = layer(name), inputs(7)
        w, delta = dict(mixer.named_parameters()), shifted(inputs(7))
        expected = F.relu((x + delta * w["mix_k"]) @ w["k_proj.weight"].T).square() @ w["v_proj.weight"].T
        if "mix_r" in w:
            expected = expected * ((x + delta * w["mix_r"]) @ w["r_proj.weight"].T).sigmoid()
        # float64, the same sums.
        torch.testing.assert_close(run(mixer, x)[0], expected, rtol=1e-12, atol=1e-12)


def test_rwkv7_mixes_in_the_first_layers_values() -> None:
    """As flash-linear-attention's RWKV7Attention, token by token: decays, removal keys, value residual, gated norm."""
    gives, takes, x = layer("rwkv7_gives"), layer("rwkv7_takes"), inputs(6)
    _, after = gives(x, None, mask=None, position=torch.zeros(2, dtype=torch.long))
    first = after["carried.first_value"]
    found, _ = run(takes, x, first_value=first)
    w, delta = dict(takes.named_parameters()), shifted(x)
    r_in, w_in, k_in, v_in, a_in, g_in = (x + delta * share for share in w["mix"])

    def low_rank(name: str, inner: Tensor) -> Tensor:
        return inner @ w[f"{name}_up.weight"].T

    r, k, v = (y @ w[f"{name}_proj.weight"].T for name, y in (("r", r_in), ("k", k_in), ("v", v_in)))
    torch.testing.assert_close(first, (x + delta * gives.mix[3]) @ gives.v_proj.weight.T, rtol=1e-12, atol=1e-12)
    v = v + (first - v) * (w["value_share"] + low_rank("value", v_in @ w["value_down.weight"].T)).sigmoid()
    decay = torch.exp(
        -0.6065306597126334 * (w["decay"] + low_rank("decay", (w_in @ w["decay_down.weight"].T).tanh())).sigmoid()
    )
    a = (w["rate"] + low_rank("rate", a_in @ w["rate_down.weight"].T)).sigmoid()
    g = low_rank("gate", (g_in @ w["gate_down.weight"].T).sigmoid())
    removal = F.normalize((k * w["removal_scale"]).unflatten(-1, (3, 4)), dim=-1)
    k = k * (1 + (a - 1) * w["rate_scale"])
    r, k, v, decay, a = (y.unflatten(-1, (3, 4)) for y in (r, k, v, decay, a))
    state, outputs = x.new_zeros(2, 3, 4, 4), []
    for t in range(6):
        read = torch.einsum("bhk,bhkv->bhv", -removal[:, t], state)
        state = (
            decay[:, t, :, :, None] * state
            + (removal * a)[:, t, :, :, None] * read[:, :, None]
            + k[:, t, :, :, None] * v[:, t, :, None]
        )
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
    o = torch.stack(outputs, 1)
    o = F.group_norm(o.flatten(0, 1).flatten(1), 3, w["o_norm.weight"], w["o_norm.bias"], 64e-5).view(2, 6, 12)
    o = (o + ((r * k * w["bonus"]).sum(-1, keepdim=True) * v).flatten(-2)) * g
    # float64; the norm of small heads enlarges rounding.
    torch.testing.assert_close(found, o @ w["o_proj.weight"].T, rtol=1e-9, atol=1e-9)
    with pytest.raises(UserError, match="no layer before it gives any"):
        run(takes, x)
    with pytest.raises(UserError, match="has 12 value channels, but the layer that gives its values has 5"):
        run(takes, x, first_value=first[..., :5])


def test_hgrn2_learns_bounds_in_a_table() -> None:
    """As flash-linear-attention's HGRN2Attention with short convolutions: one SiLU, on the queries alone."""
    mixer, x = layer("hgrn2_bounds"), inputs(8)
    w = dict(mixer.named_parameters())
    table = w["bounds"].softmax(0).cumsum(0) - w["bounds"].softmax(0)[0]
    y, after = mixer(x, None, mask=None, position=torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(after["carried.lower_bounds"], table, rtol=1e-12, atol=1e-12)

    def convolved(name: str) -> Tensor:
        taps = w[f"{name}_conv.weight"]
        projected = F.pad((x @ w[f"{name}_proj.weight"].T).mT, (taps.shape[1] - 1, 0))
        return F.conv1d(projected, taps[:, None], groups=len(taps)).mT.unflatten(-1, (2, -1))

    q, raw, v = F.silu(convolved("q")), convolved("f"), convolved("i")
    bound = table[2].unflatten(-1, (2, 4))
    forget = bound + (1 - bound) * raw.sigmoid()
    state, outputs = x.new_zeros(2, 2, 4, 6), []
    for t in range(8):
        state = forget[:, t, ..., None] * state + (1 - forget)[:, t, ..., None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * 4**-0.5)
    o = torch.stack(outputs, 1).flatten(-2)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm.weight"]
    # float64, the same sums in another order.
    torch.testing.assert_close(y, o @ w["o_proj.weight"].T, rtol=1e-10, atol=1e-10)
    with pytest.raises(UserError, match=r'no layer before it holds a table that long\. The first .* "bound_rows": 2'):
        run(layer("hgrn2_takes"), x)


def delta_steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, steps: int = 1) -> Tensor:
    """The gated delta rule as it is written: q, decay of a token; k, v, beta of its steps ``[B, T, n, H, ...]``."""
    state, outputs = v.new_zeros(v.shape[0], v.shape[3], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = decay[:, t, ..., None] * state
        for n in range(steps):
            read = torch.einsum("bhk,bhkv->bhv", k[:, t, n], state)
            change = beta[:, t, n, :, None] * (v[:, t, n] - read)
            state = state + k[:, t, n, ..., None] * change[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def silu_convolved(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    projected, taps = x @ weights[f"{name}_proj.weight"].T, weights.get(f"{name}_conv.weight")
    if taps is None:
        return F.silu(projected)
    return F.silu(F.conv1d(F.pad(projected.mT, (3, 0)), taps[:, None], groups=len(taps)).mT)


@pytest.mark.parametrize("name", ["gated_delta_product", "gated_delta_product_values"])
def test_gated_delta_product_takes_its_steps(name: str) -> None:
    mixer, x = layer(name), inputs(7)
    w, config = dict(mixer.named_parameters()), mixer.config
    n, heads = config.steps, config.value_head_count
    q, k, v = (silu_convolved(x, w, part) for part in "qkv")
    repeats = heads // 2
    q = unit(q.unflatten(-1, (2, 4))).repeat_interleave(repeats, 2)
    k = unit(k.unflatten(-1, (n, 2, 4))).repeat_interleave(repeats, 3)
    beta = (x @ w["b_proj.weight"].T).sigmoid().unflatten(-1, (n, heads)) * (2 if config.negative_eigenvalues else 1)
    decay = x.new_ones(2, 7, heads, 1)
    if config.decay:
        decay = torch.exp(-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"]))[..., None]
    o = delta_steps(q, k, v.unflatten(-1, (n, heads, 6)), decay, beta, n)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm.weight"]
    if config.output_gate:
        o = o * F.silu((x @ w["g_proj.weight"].T).unflatten(-1, (heads, 6)))
    # float64, chunks in another order of sums.
    torch.testing.assert_close(run(mixer, x)[0], o.flatten(-2) @ w["o_proj.weight"].T, rtol=1e-9, atol=1e-9)


def test_one_step_of_gated_delta_product_is_gated_delta_net() -> None:
    torch.manual_seed(0)
    sizes = HEADS | {"value_heads": 4, "negative_eigenvalues": True}
    one = mixer_config({"type": "gated_delta_product", **sizes, "steps": 1}).build(D).double()
    other = mixer_config({"type": "gated_delta_net", **sizes}).build(D).double()
    other.load_state_dict(one.state_dict())
    x = inputs(20)
    # float64, the same op.
    torch.testing.assert_close(run(one, x)[0], run(other, x)[0], rtol=1e-12, atol=1e-12)


def test_kda_with_more_value_heads_and_a_decay_floor() -> None:
    mixer, x = layer("kda_value_heads"), inputs(7)
    w = dict(mixer.named_parameters())
    q, k, v = (silu_convolved(x, w, part) for part in "qkv")
    q, k = (unit(y.unflatten(-1, (2, 4))).repeat_interleave(2, 2) for y in (q, k))
    raw = (x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).unflatten(-1, (4, 4))
    decay = torch.exp(-5 * torch.sigmoid(w["A_log"].exp()[:, None] * raw))
    beta = (x @ w["b_proj.weight"].T).sigmoid()
    o = delta_steps(q, k[:, :, None], v.unflatten(-1, (1, 4, 6)), decay, beta[:, :, None])
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm.weight"]
    gate = x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
    o = o.flatten(-2) * gate.sigmoid()
    # float64, chunks in another order of sums.
    torch.testing.assert_close(run(mixer, x)[0], o @ w["o_proj.weight"].T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mom_tied", "mom_tied_all"])
def test_tied_memories_are_sequences_of_their_own(name: str) -> None:
    """As flash-linear-attention's MomAttention: each memory convolves its own tokens, queries included."""
    mixer, x = layer(name), inputs(13, batch=1)
    w, config = dict(mixer.named_parameters()), mixer.config
    probability = (x @ w["router.weight"].T).softmax(-1)
    top, chosen = probability.topk(config.active, -1)
    top = top / top.sum(-1, keepdim=True)
    total = x.new_zeros(1, 13, 2, 6)
    for memory in range(config.all_memories):
        own = memory < config.memories
        real = (chosen == memory).any(-1)[0] if own else torch.ones(13, dtype=torch.bool)
        share = (top * (chosen == memory)).sum(-1)[:, real] if own else top.new_ones(1, 13)
        tokens = x[:, real]
        rows = slice(None)
        held = dict(w)
        for part in "kvab":
            rows = w[f"{part}_proj.weight"]
            held[f"{part}_proj.weight"] = rows if config.tied_projections else rows.chunk(config.all_memories)[memory]
        q, k, v = (silu_convolved(tokens, held, part) for part in "qkv")
        beta = (tokens @ held["b_proj.weight"].T).sigmoid()
        decay = torch.exp(-w["A_log"].exp() * F.softplus(tokens @ held["a_proj.weight"].T + w["dt_bias"]))
        q, k = (unit(y.unflatten(-1, (2, 4))) for y in (q, k))
        o = delta_steps(q, k[:, :, None], v.unflatten(-1, (1, 2, 6)), decay[..., None], beta[:, :, None])
        total[:, real] = total[:, real] + o * share[..., None, None]
    o = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm.weight"]
    if config.output_gate:
        o = o * F.silu((x @ w["g_proj.weight"].T).unflatten(-1, (2, 6)))
    # float64, chunks in another order of sums.
    torch.testing.assert_close(run(mixer, x)[0], o.flatten(-2) @ w["o_proj.weight"].T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("rg_lru", {"num_heads": 3}, r"num_heads \(3\) must divide inner_dim \(10\)"),
        ("rg_lru", {"activation": "relu"}, "activation must be one of gelu_tanh, gelu, silu"),
        ("rwkv4", {"inner_dim": 0}, "inner_dim must be a positive whole number"),
        ("rwkv7_gives", {"value_rank": 0}, "value_rank must be a positive whole number"),
        ("rwkv7_gives", {"gives_values": 1}, "gives_values must be true or false"),
        ("hgrn2_takes", {"conv_activation": "relu"}, "conv_activation must be silu or null"),
        ("hgrn2_takes", {"bound_row": 0}, "bound_row must be a positive whole number"),
        ("kda_value_heads", {"value_heads": 3}, r"value_heads \(3\) must be a multiple of num_heads \(2\)"),
        ("kda_value_heads", {"decay_floor": 0.0}, "decay_floor must be a number below 0"),
        ("gated_delta_product", {"steps": 0}, "steps must be a positive whole number"),
        ("gated_delta_product", {"value_heads": 5}, r"value_heads \(5\) must be a multiple of num_heads \(2\)"),
    ],
)
def test_impossible_sizes_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixer_config(CASES[name] | changes)


@pytest.mark.parametrize("name", ["rwkv4", "rwkv7_channel"])
def test_the_input_width_is_that_of_the_model(name: str) -> None:
    with pytest.raises(UserError, match=r"input_dim \(12\) must be the hidden_size of the model \(16\)"):
        mixer_config(CASES[name]).build(16)


def test_new_fields_are_left_out_at_their_defaults() -> None:
    for name in ("rwkv7_gives", "hgrn2_takes", "kda_value_heads", "mom_tied"):
        config = mixer_config(CASES[name])
        plain = {key: value for key, value in CASES[name].items() if key not in config.optional_fields}
        assert not set(mixer_config(plain).to_dict()) & set(config.optional_fields)
