"""Mixtures of experts beside those of transformers, with the same weights, and the ways to form their products."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.jamba import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock, load_balancing_loss_func

import longrecall
from longrecall.errors import UserError
from longrecall.layers.experts import Experts, Way, groups_products
from longrecall.layers.mixers.base import AUXILIARY_LOSS
from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.moe import MixtureOfExperts, balance_loss
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import fixed_shapes
from tests.conftest import MIXERS

WIDTH = 16


class GraniteChannels(nn.Module):
    """Granite's experts and the MLP beside them, which its decoder layer adds up."""

    def __init__(self, config: GraniteMoeHybridConfig) -> None:
        super().__init__()
        self.experts, self.shared = granite.GraniteMoeHybridMoE(config), granite.GraniteMoeHybridMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x) + self.shared(x)
        return y


def qwen(experts: int, k: int, inner: int, shared: int, *, norm: bool = True, **more: Any) -> tuple[Any, ...]:
    theirs = {"num_experts": experts, "num_experts_per_tok": k, "moe_intermediate_size": inner}
    theirs |= {"shared_expert_intermediate_size": shared, "norm_topk_prob": norm}
    ours = {"num_experts": experts, "top_k": k, "inner_size": inner, "normalise": norm}
    ours |= {"shared_size": shared, "shared_gate": True, **more}
    return Qwen3NextSparseMoeBlock, partial(Qwen3NextConfig, **theirs), ours


def qwen35(experts: int, k: int, inner: int, shared: int) -> tuple[Any, ...]:
    theirs = {"num_experts": experts, "num_experts_per_tok": k, "moe_intermediate_size": inner}
    theirs["shared_expert_intermediate_size"] = shared
    ours = qwen(experts, k, inner, shared)[2]
    return Qwen3_5MoeSparseMoeBlock, partial(Qwen3_5MoeTextConfig, **theirs), ours


def jamba(experts: int, k: int, inner: int) -> tuple[Any, ...]:
    theirs = {"num_experts": experts, "num_experts_per_tok": k, "intermediate_size": inner}
    ours = {"num_experts": experts, "top_k": k, "inner_size": inner, "normalise": False}
    return JambaSparseMoeBlock, partial(JambaConfig, **theirs), ours


def granites(experts: int, k: int, inner: int, shared: int) -> tuple[Any, ...]:
    theirs = {"num_local_experts": experts, "num_experts_per_tok": k, "intermediate_size": inner}
    theirs |= {"shared_intermediate_size": shared, "mamba_n_heads": 4}
    ours = {"num_experts": experts, "top_k": k, "inner_size": inner, "router": "top_k_softmax", "shared_size": shared}
    return GraniteChannels, partial(GraniteMoeHybridConfig, **theirs), ours


def sigmoid(experts: int, k: int, groups: int, best: int, scale: float, *, norm: bool) -> tuple[dict[str, Any], ...]:
    theirs = {"num_experts_per_tok": k, "n_group": groups, "topk_group": best, "routed_scaling_factor": scale}
    theirs["norm_topk_prob"] = norm
    ours = {"num_experts": experts, "top_k": k, "router": "sigmoid", "correction_bias": True, "normalise": norm}
    ours |= {"groups": groups, "active_groups": best, "scale": scale, "router_in_fp32": True}
    return theirs, ours


def kimi(inner: int, shared: int, *args: Any, norm: bool = True) -> tuple[Any, ...]:
    theirs, ours = sigmoid(*args, norm=norm)
    theirs |= {"num_local_experts": args[0], "moe_intermediate_size": inner, "n_shared_experts": shared}
    return (
        KimiLinearMoE,
        partial(KimiLinearConfig, num_hidden_layers=1, **theirs),
        ours | {"inner_size": inner, "shared_size": shared * inner},
    )


def nemotron(inner: int, shared: int, latent: int | None, *args: Any, bias: bool, norm: bool = True) -> tuple[Any, ...]:
    theirs, ours = sigmoid(*args, norm=norm)
    theirs |= {"n_routed_experts": args[0], "moe_intermediate_size": inner, "mlp_bias": bias}
    theirs |= {"moe_shared_expert_intermediate_size": shared, "moe_latent_size": latent}
    ours |= {"inner_size": inner, "shared_size": shared, "latent_size": latent, "bias": bias}
    return NemotronHMoE, partial(NemotronHConfig, **theirs), ours | {"gated": False, "activation": "relu2"}


CASES: dict[str, tuple[Any, ...]] = {
    "qwen3_next": qwen(8, 3, 12, 20),
    "qwen3_next_plain": qwen(5, 2, 8, 8, norm=False),
    "qwen3_next_all": qwen(4, 4, 6, 30),
    "qwen3_next_one": qwen(6, 1, 6, 12),
    "qwen3_5": qwen35(8, 2, 12, 20),
    "qwen3_5_wide": qwen35(16, 8, 4, 4),
    "qwen3_5_one": qwen35(3, 1, 24, 6),
    "jamba": jamba(4, 2, 12),
    "jamba_one": jamba(6, 1, 8),
    "jamba_many": jamba(16, 5, 4),
    "granite": granites(8, 3, 12, 20),
    "granite_one": granites(4, 1, 6, 8),
    "granite_many": granites(12, 6, 4, 40),
    "kimi": kimi(12, 1, 8, 3, 1, 1, 2.446),
    "kimi_groups": kimi(6, 2, 12, 3, 4, 2, 1.5),
    "kimi_sums": kimi(8, 1, 8, 2, 2, 1, 0.5, norm=False),
    "nemotron": nemotron(12, 20, None, 8, 2, 1, 1, 2.5, bias=False),
    "nemotron_latent": nemotron(6, 24, 10, 8, 3, 2, 1, 1.0, bias=True),
    "nemotron_sums": nemotron(8, 8, None, 12, 2, 3, 2, 0.7, bias=True, norm=False),
    "nemotron_narrow": nemotron(4, 8, 4, 6, 4, 1, 1, 5.0, bias=False),
}
NAMES = {
    "experts.router": "router",
    "experts.experts": "experts",
    "gate.e_score_correction_bias": "correction_bias",
    "gate.weight": "router.weight",
    "shared_experts": "shared",
    "shared_expert_gate": "shared_gate",
    "shared_expert": "shared",
    "fc1_latent_proj": "latent_in",
    "fc2_latent_proj": "latent_out",
}


def in_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors (or gradients) of a block of transformers."""
    found = {}
    for name, tensor in tensors.items():
        if name == "shared.input_linear.weight":
            found["shared.gate_proj.weight"], found["shared.up_proj.weight"] = tensor.chunk(2)
            continue
        old = next((old for old in NAMES if name == old or name.startswith(f"{old}.")), "")
        name = (NAMES[old] + name.removeprefix(old) if old else name).replace("output_linear", "down_proj")
        found[name] = tensor
    return found


def make_pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, MixtureOfExperts]:
    """A block of transformers with random weights, and ours with the same."""
    kind, config, ours = CASES[name]
    config = config(hidden_size=WIDTH)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        theirs = kind(config)
    theirs = theirs.to_empty(device="cpu").to(dtype)
    generator = torch.Generator().manual_seed(len(name))
    for tensor in theirs.state_dict().values():
        tensor.normal_(std=0.5, generator=generator)
    block = mixer_config({"type": "moe", **ours}).build(WIDTH).to(dtype)
    block.load_state_dict(in_our_names(theirs.state_dict()))
    assert isinstance(block, MixtureOfExperts)
    return theirs, block.eval()


def value_and_gradients(block: nn.Module, x: Tensor, weights: Tensor) -> list[Any]:
    own = x.clone().requires_grad_()
    y = block(own)
    (y * weights).sum().backward()
    gradients = {name: tensor.grad for name, tensor in block.named_parameters()}
    return [y, own.grad, gradients if isinstance(block, MixtureOfExperts) else in_our_names(gradients)]


@pytest.mark.parametrize("name", CASES)
def test_the_experts_of_transformers(name: str) -> None:
    theirs, ours = make_pair(name)
    x, weights = torch.randn(2, 3, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    # Theirs round scores, or the weights of the experts, to float32 on the way: 24 bits, of sums of up to 8 terms.
    torch.testing.assert_close(
        value_and_gradients(ours, x, weights), value_and_gradients(theirs, x, weights), rtol=1e-5, atol=1e-5
    )
    # A decoding step's form of input: one token of every row.
    torch.testing.assert_close(ours(x[:, 2]), ours(x)[:, 2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "granite", "kimi_groups"])
def test_ties_are_broken_as_there(name: str) -> None:
    theirs, ours = make_pair(name, torch.float32)
    for block in (theirs, ours):
        for key, tensor in block.state_dict().items():
            if "router" in key or key.startswith("gate.") or "correction" in key:
                tensor.zero_()
    x = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(4))
    # float32; the sums over experts are in another order.
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


WAYS: tuple[Way, ...] = ("sorted", "gathered", "masked")
CHOICES: dict[str, list[list[int]]] = {
    "uneven": [[0, 3], [3, 1], [3, 0], [0, 1], [3, 1]],
    "all_to_two": [[2, 4]] * 6,
    "all_to_all": [[0, 1], [2, 3], [4, 0]],
    "one_token": [[4, 2]],
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_all_ways_form_the_same_products(name: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    experts = Experts(5, 4, 3, gated=gated, activation="silu" if gated else "relu2").double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    chosen = torch.tensor(CHOICES[name])
    x = torch.randn(len(chosen), 4, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(chosen.shape, dtype=torch.float64, generator=generator).requires_grad_()
    up = experts.gate_up_proj if gated else experts.up_proj
    expected = torch.zeros_like(x)
    for token, (row, own) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, weight in zip(row, own, strict=True):
            y = F.linear(x[token], up[expert])
            y = F.silu(y[:3]) * y[3:] if gated else F.relu(y) ** 2
            expected[token] = expected[token] + weight * F.linear(y, experts.down_proj[expert])
    inputs = (x, weights, up, experts.down_proj)
    wanted = torch.autograd.grad(expected.sum(), inputs)
    for way in WAYS:
        y = experts(x, chosen, weights, way=way)
        found = torch.autograd.grad(y.sum(), inputs)
        # float64, sums in another order.
        torch.testing.assert_close([y, *found], [expected, *wanted], rtol=1e-10, atol=1e-12)
        assert not found[2][sorted({*range(5)} - {*chosen.flatten().tolist()})].any()
        assert torch.autograd.gradcheck(lambda x, w, way=way: experts(x, chosen, w, way=way), (x, weights)), way
    assert torch.autograd.gradgradcheck(lambda x, w: experts(x, chosen, w), (x, weights))


def test_no_length_depends_on_values_where_none_may(monkeypatch: pytest.MonkeyPatch) -> None:
    _, block = make_pair("qwen3_next")
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    expected = block(x)
    with fixed_shapes(), monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", None)
        for length in (9, 2):
            torch.testing.assert_close(block(x[:, :length]), expected[:, :length], rtol=1e-12, atol=1e-12)
    assert block(x[:, :0]).shape == (1, 0, WIDTH)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_recorded_step(tokens: int, dtype: torch.dtype) -> None:
    _, block = make_pair("kimi", torch.float32)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(7))
    expected = block.to("cuda", dtype)(x.to("cuda", dtype)).float().cpu()
    fixed, graph = x.to("cuda", dtype), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = block(fixed)
    fixed.copy_(fixed.flip(0))
    graph.replay()
    torch.testing.assert_close(y.float().cpu(), expected.flip(0), rtol=0.02, atol=0.02)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and groups_products(torch.device("cuda"), torch.bfloat16)), reason="needs a Hopper"
)
@pytest.mark.parametrize("gated", [True, False])
def test_grouped_products(gated: bool) -> None:
    experts = Experts(5, 32, 24, gated=gated, activation="silu" if gated else "relu2").to("cuda", torch.bfloat16)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(70, 32, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    weights = torch.rand(70, 2, generator=generator).cuda().requires_grad_()
    chosen = torch.tensor([[0, 3], [3, 1]]).repeat(35, 1).cuda()
    found = []
    for way in ("grouped", "sorted"):
        y = experts(x, chosen, weights, way=way)
        found.append([y, *torch.autograd.grad(y.square().sum(), (x, weights, *experts.parameters()))])
    # bfloat16, rounded at the same places; sums in another order.
    torch.testing.assert_close(*found, rtol=0.03, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "granite", "kimi", "nemotron_latent"])
def test_narrow_numbers(name: str) -> None:
    _, block = make_pair(name, torch.float32)
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(9)).bfloat16()
    expected = block(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = block(x.float())
    narrow = block.bfloat16()(x)
    assert narrow.dtype == torch.bfloat16
    for y in (under_autocast, narrow):
        # Near ties rounding sends a token elsewhere: most tokens are as near as bfloat16's 8 bits bring them.
        near = ((y.float() - expected).norm(dim=-1) / expected.norm(dim=-1)) < 0.03
        assert near.float().mean() > 0.8


def test_the_balance_loss_of_transformers() -> None:
    """Of one layer; balanced use gives k, and padding does not count."""
    ours = CASES["qwen3_next"][2]
    block = mixer_config({"type": "moe", **ours, "balance": 0.25}).build(WIDTH)
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(10))
    nn.init.normal_(block.router.weight, generator=torch.Generator().manual_seed(11))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    logits = block.router(x.flatten(0, 1))
    for given in (None, mask):
        y, own = block(x, None if given is None else given.bool())
        expected = load_balancing_loss_func((logits,), 8, 3, given)
        # float32 sums of 12 terms.
        torch.testing.assert_close(own[AUXILIARY_LOSS], 0.25 * expected, rtol=1e-5, atol=0)
        own_gradient = torch.autograd.grad(own[AUXILIARY_LOSS], block.router.weight)[0]
        gradient = torch.autograd.grad(0.25 * expected, block.router.weight, retain_graph=True)[0]
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-4, atol=1e-7)
    padded = x.clone()
    padded[0, :2] = 100.0
    assert torch.equal(block(padded, mask.bool())[1][AUXILIARY_LOSS], own[AUXILIARY_LOSS])
    with torch.no_grad():
        assert torch.equal(block(x), y)
    assert torch.equal(block.eval()(x), y)
    even = torch.full((4, 8), 1 / 8), torch.arange(8).view(4, 2)
    assert balance_loss(*even).item() == 2
    assert isinstance(mixer_config({"type": "moe", **ours, "balance": 0.0}).build(WIDTH)(x), Tensor)


@pytest.mark.parametrize("name", ["granite", "kimi_groups"])
def test_the_balance_loss_teaches_the_router(name: str) -> None:
    """A router that sends nearly all tokens to the same experts sends them to others after some steps."""
    _, _, ours = CASES[name]
    block, generator = mixer_config({"type": "moe", **ours, "balance": 1.0}).build(WIDTH), torch.Generator()
    x = torch.randn(1, 64, WIDTH, generator=generator.manual_seed(12)) + 1
    nn.init.normal_(block.router.weight, std=0.2, generator=generator)
    with torch.no_grad():
        block.router.weight[:2] += 0.2
    optimiser, losses = torch.optim.Adam([block.router.weight], lr=0.05), []
    for _ in range(40):
        loss = block(x)[1][AUXILIARY_LOSS]
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    least = block.config.top_k
    assert losses[-1] - least < 0.5 * (losses[0] - least)


def test_the_losses_of_a_model(tmp_path: Path) -> None:
    """They are added up over its layers, of real tokens alone; a narrow copy keeps the correction in float32."""
    moe = {"type": "moe", **CASES["kimi_groups"][2], "balance": 0.5}
    layers = [{"blocks": [{"name": "mixer", "module": MIXERS["gla"]}, {"name": "mlp", "module": moe}]}] * 2
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=WIDTH, layers=layers, initializer_range=0.2))
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(13))
    padded, mask = F.pad(tokens, (3, 0)), F.pad(torch.ones_like(tokens), (3, 0))
    for projection in (model.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.router.weight):
        # Of 96 numbers or more: the standard error of their spread is 7%.
        assert 0.15 < projection.std() < 0.25, "experts are initialised as every projection is"
    loss = model.train()(tokens).auxiliary_loss
    assert loss > 2 * 0.5 * 3
    for other in (
        model(padded, attention_mask=mask).auxiliary_loss,
        model(tokens.view(1, -1), cu_seqlens=torch.tensor([0, 8, 16])).auxiliary_loss,
    ):
        # float32 sums in another order.
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
    weight = model.model.layers[0].mlp.router.weight
    wanted = torch.autograd.grad(loss, weight)[0]
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(torch.autograd.grad(model(tokens).auxiliary_loss, weight)[0], wanted)
    assert model.eval()(tokens).auxiliary_loss is None
    bias = model.model.layers[1].mlp.correction_bias
    bias.copy_(torch.linspace(0.1, 0.7, len(bias)))
    save(model, tmp_path / "model")
    for loaded in (longrecall.load(tmp_path / "model", dtype="bfloat16"), longrecall.load(tmp_path / "model").half()):
        narrow = loaded.model.layers[1].mlp
        assert narrow.router.weight.dtype in (torch.bfloat16, torch.float16)
        assert torch.equal(narrow.correction_bias, bias)


def test_adapters_on_the_experts() -> None:
    """PEFT's target_parameters: the adapters learn, the experts do not, and merging keeps the function."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    block = mixer_config({"type": "moe", **CASES["qwen3_next"][2]}).build(WIDTH)
    x = torch.randn(1, 9, WIDTH)
    before = block.eval()(x)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = peft.get_peft_model(
        block, peft.LoraConfig(r=2, target_modules=["shared.up_proj"], target_parameters=targets)
    )
    assert torch.equal(adapted(x), before)
    optimiser = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimiser.zero_grad()
        (adapted(x) - x).square().mean().backward()
        optimiser.step()
    after = adapted(x)
    moved = [name for name, tensor in adapted.named_parameters() if tensor.grad is not None and tensor.grad.any()]
    assert len(moved) == 6
    assert all("lora_" in name for name in moved)
    assert not torch.equal(after, before)
    # float32: the same products with sums of weights formed before.
    torch.testing.assert_close(adapted.merge_and_unload()(x), after, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, r"top_k \(9\) cannot be more than the 8 experts"),
        ({"router": "softmx"}, "router must be one of .* Did you mean .softmax"),
        ({"groups": 3}, r"groups \(3\) must divide num_experts \(8\)"),
        ({"router": "sigmoid", "groups": 4, "active_groups": 5}, r"active_groups \(5\) cannot be more than groups"),
        ({"router": "sigmoid", "groups": 4, "top_k": 3}, r"top_k \(3\) cannot be more than the 2 experts"),
        ({"router": "sigmoid", "groups": 8}, "needs two experts or more"),
        ({"groups": 2}, "need the router .sigmoid"),
        ({"correction_bias": True}, "need the router .sigmoid"),
        ({"router": "top_k_softmax", "normalise": False}, "already sum to 1"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
        ({"shared_size": -1}, "shared_size must be a whole number >= 0"),
        ({"latent_size": 0}, "latent_size must be a positive whole number"),
        ({"scale": -1.0}, "scale must be a number from 0"),
        ({"activation": "tanh"}, "activation must be one of"),
    ],
)
def test_bad_descriptions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixer_config({"type": "moe", "num_experts": 8, "top_k": 1, "inner_size": 4, **fields})
