"""Layers as lists of residual blocks: norms before and after, multipliers, single modules, several states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longrecall
from longrecall.errors import UserError
from longrecall.inference.step import DecodingStep
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery.expansion import expand
from tests.conftest import MIXERS

WIDTH, VOCABULARY, ROOM = 32, 40, 24
MLP = {"type": "mlp", "inner_size": 24}
SQUARED = MLP | {"gated": False, "activation": "relu2", "bias": True}
MOE = {"type": "moe", "num_experts": 4, "top_k": 2, "inner_size": 8, "shared_size": 12, "shared_gate": True}
SIGMOID_MOE = {"type": "moe", "num_experts": 6, "top_k": 2, "inner_size": 8, "router": "sigmoid", "groups": 3} | {
    "active_groups": 2,
    "correction_bias": True,
    "latent_size": 10,
}
SHARED: dict[str, Any] = {
    "type": "shared_block",
    "attention": {"type": "attention", "num_heads": 2, "head_dim": 16, "input_size": 2 * WIDTH},
    "mixer": MIXERS["mamba2"],
    "mlp_size": 24,
    "adapter_rank": 3,
}
GEMMA = {"kind": "rms", "offset": 1.0}
LAYER_NORM = {"kind": "layer", "bias": True, "eps": 1e-3}


def one(module: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "mixer", "module": module, **more}


def mlp(**more: Any) -> dict[str, Any]:
    return {"name": "mlp", "module": MLP} | more


MODELS: dict[str, dict[str, Any]] = {
    "single_modules": {
        "layers": [{"blocks": [one(module)]} for module in (MIXERS["mamba2"], MLP, MIXERS["attention"], MLP)]
    },
    "post_norms": {
        "residual_in_fp32": False,
        "layers": [
            {"blocks": [one(MIXERS["gated_delta_net"]), mlp()]},
            {"blocks": [one(MIXERS["attention"], norm=None, post_norm={}), mlp(norm=None, post_norm={})]},
        ],
    },
    "multipliers": {
        "embedding_multiplier": 3.0,
        "logits_multiplier": 0.25,
        "layers": [{"blocks": [one(MIXERS["mamba2"], multiplier=0.5), mlp(multiplier=0.5)]}] * 2,
    },
    "one_plus_weight": {
        "embedding_multiplier": WIDTH**0.5,
        "final_norm": GEMMA,
        "logits_soft_cap": 2.0,
        "layers": [{"blocks": [one(MIXERS["gla_conv"], norm=GEMMA), mlp(norm=GEMMA, post_norm=GEMMA)]}] * 2,
    },
    "layer_norms": {
        "embedding_norm": LAYER_NORM,
        "final_norm": LAYER_NORM,
        "layers": [
            {"blocks": [one(MIXERS["retnet"], norm=LAYER_NORM), mlp(norm=LAYER_NORM)]},
            {"mixer": MIXERS["gla"], "mlp_size": 24},
        ],
    },
    "experts": {
        "layers": [
            {"blocks": [one(MIXERS["mamba2"]), mlp(module=MOE, norm=GEMMA)]},
            {"blocks": [one(SIGMOID_MOE)]},
            {"blocks": [one(MIXERS["attention"]), mlp(module=SQUARED, multiplier=0.5)]},
        ]
    },
    "shared": {
        "layers": [{"blocks": [one(SHARED, norm=None)]}, {"blocks": [one(SHARED | {"weights_of": 0}, norm=None)]}]
    },
    "adapted": {"layers": [{"blocks": [one(SHARED | {"attention_adapters": True}, norm=None)]}]},
    "two_states": {
        "layers": [
            {"blocks": [one(MIXERS["gla_conv"]), {"name": "second", "module": MIXERS["delta_net"]}]},
            {
                "blocks": [
                    one(MIXERS["attention"]),
                    {"name": "second", "module": MIXERS["mamba2"], "norm": GEMMA},
                    mlp(),
                ]
            },
        ]
    },
}


def build(name: str, dtype: torch.dtype = torch.float64) -> RecurrentLM:
    torch.manual_seed(0)
    model = RecurrentLM(
        RecurrentConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, initializer_range=0.2, **MODELS[name])
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            # Fresh scales are one and biases zero: an exchanged norm would not show.
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval()


def ids(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(2))


def written_out(model: RecurrentLM, tokens: Tensor) -> Tensor:
    """The definition: one block after the other, on a whole text."""
    config = model.config
    x = model.model.embeddings(tokens) * config.embedding_multiplier
    if model.model.embedding_norm is not None:
        x = model.model.embedding_norm(x)
    embedded = x
    position = torch.zeros(len(tokens), dtype=torch.long)
    for layer, described in zip(model.model.layers, config.layer_configs(), strict=True):
        for block in described.blocks:
            norm, module = getattr(layer, f"{block.name}_norm"), getattr(layer, block.name)
            y = x if norm is None else norm(x)
            taken = {"embedded": embedded} if block.module.takes == ("embedded",) else {}
            y = module(y) if block.module.positionwise else module(y, None, mask=None, position=position, **taken)[0]
            y = layer.get_submodule(f"{block.name}_post_norm")(y) if block.post_norm is not None else y
            x = x + block.multiplier * y
    logits = model.lm_head(model.model.norm(x)) * config.logits_multiplier
    cap = config.logits_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_blocks(name: str, tmp_path: Path) -> None:
    model, tokens = build(name), ids()
    out = model(tokens, labels=tokens)
    torch.testing.assert_close(out.logits, written_out(model, tokens))
    torch.testing.assert_close(model(tokens, labels=tokens, loss_only=True).loss, out.loss)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items() if k != "lm_head.weight"} == (
        model.config.tensor_shapes()
    )
    first = model(tokens[:, :6])
    torch.testing.assert_close(model(tokens[:, 6:], past_key_values=first.past_key_values).logits, out.logits[:, 6:])
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    mask = torch.tensor([[0, 0, 0] + [1] * tokens.shape[1]] * 2)
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], out.logits)
    packed = model(tokens.reshape(1, -1), cu_seqlens=torch.tensor([0, 11, 22]))
    torch.testing.assert_close(packed.logits.view_as(out.logits), out.logits)

    step = DecodingStep(model, 2, torch.float64, fused=False, room=ROOM)
    step.load(first.past_key_values)
    for column in range(6, 9):
        step.ids.copy_(tokens[:, column])
        torch.testing.assert_close(step(), out.logits[:, column])
    expected = model(tokens[:, :9]).past_key_values
    for found, layer in zip(step.export().layers, expected.layers, strict=True):
        assert found.keys() == layer.keys()
        for key in layer:
            torch.testing.assert_close(found[key].double(), layer[key].double(), rtol=1e-5, atol=1e-6)  # float32 states

    save(model, tmp_path / "model")
    again = longrecall.load(tmp_path / "model")
    assert again.config.layers == model.config.layers
    torch.testing.assert_close(again(tokens).logits, out.logits, rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint()
    assert again.generate(tokens, max_new_tokens=3).shape == (2, 14)


@pytest.mark.parametrize("name", ["one_plus_weight", "multipliers", "two_states", "experts", "shared", "adapted"])
def test_the_fused_step_of_a_model_of_blocks(name: str) -> None:
    pytest.importorskip("triton")
    model, tokens = build(name, torch.float32), ids()
    for rows in (2, 5):  # kernels for a handful of rows, and for more
        text = tokens[:1].repeat(rows, 1)
        step = DecodingStep(model, rows, fused=True, room=ROOM)
        step.load(model(text[:, :6]).past_key_values)
        step.ids.copy_(text[:, 6])
        # float32 sums in another order, through two layers of logits up to 30.
        torch.testing.assert_close(step(), model(text).logits[:, 6], rtol=1e-4, atol=2e-4)


def test_gradients_reach_every_tensor() -> None:
    for name in MODELS:
        model = build(name).train()
        model(ids(), labels=ids()).loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_usual_layer_is_described_as_ever() -> None:
    usual = {"mixer": MIXERS["gla"], "mlp_size": 24}
    blocks = {"blocks": [one(MIXERS["gla"], norm={}), mlp()]}
    both = [RecurrentConfig(hidden_size=WIDTH, layers=[layer]).layers for layer in (usual, blocks)]
    assert both[0] == both[1] and set(both[0][0]) == {"mixer", "mlp_size"}
    assert not set(RecurrentConfig().to_diff_dict()) & {"embedding_multiplier", "final_norm", "logits_soft_cap"}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"blocks": []}, '"blocks" is'),
        ({"blocks": [one(MLP)], "mixer": MLP}, "either"),
        ({"blocks": [one(MLP), one(MLP)]}, "two blocks have one name"),
        ({"blocks": [one(MLP, nrm={})]}, 'no key "nrm".* "norm"'),
        ({"blocks": [one(MLP, norm={"kind": "rsm"})]}, "rms"),
        ({"blocks": [one(MLP, norm={"offset": 2})]}, "offset"),
        ({"blocks": [one(MLP, norm={"eps": 0})]}, "eps"),
        ({"blocks": [one(MLP, norm={"bias": True})]}, "bias"),
        ({"blocks": [one(MLP, multiplier="2")]}, "multiplier"),
        ({"blocks": [{"name": "a.b", "module": MLP}]}, "name"),
        ({"blocks": [{"name": "a", "module": {"type": "mpl"}}]}, "mpl"),
        ({"blocks": [{"name": "a", "module": {"type": "mlp", "inner_size": True}}]}, "inner_size"),
    ],
)
def test_bad_blocks_are_named(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"layer 0: .*{message}"):
        RecurrentConfig(layers=[layer])


def test_surgery_on_a_block(tmp_path: Path) -> None:
    model, tokens = build("multipliers"), ids()
    save(model, tmp_path / "model")
    expand(tmp_path / "model", tmp_path / "larger", method="grow_state", init="preserve", layers=[1], state_dim=8)
    larger = longrecall.load(tmp_path / "larger")
    assert larger.config.layer_configs()[1].blocks[0].multiplier == 0.5
    assert open_checkpoint(tmp_path / "larger").plain.state_size() > model.state_size()
    torch.testing.assert_close(larger(tokens).logits, model(tokens).logits)


def test_surgery_finds_the_mixer_that_it_fits(tmp_path: Path) -> None:
    """In a hybrid model `all` means every layer that the method fits, also inside of parallel branches."""
    layers = [{"blocks": [one(module)]} for module in (MIXERS["attention"], MIXERS["hymba"], MLP, MIXERS["mamba2"])]
    torch.manual_seed(0)
    config = RecurrentConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, initializer_range=0.2, layers=layers)
    model, tokens = RecurrentLM(config).double().eval(), ids()
    save(model, tmp_path / "model")
    for method, chosen, options in (("grow_state", (1, 3), {"state_dim": 8}), ("add_retrieval", (0, 1, 3), {})):
        summary = expand(tmp_path / "model", tmp_path / method, method=method, init="preserve", layers="all", **options)
        assert summary.chosen_layers == chosen
        larger = longrecall.load(tmp_path / method)
        torch.testing.assert_close(larger(tokens).logits, model(tokens).logits)
        assert set(summary.touched) <= set(larger.state_dict())
    inner = expand(tmp_path / "model", tmp_path / "no", "grow_state", layers=[1], dry_run=True, state_dim=8)
    assert "model.layers.1.mixer.ssm.in_proj.weight" in inner.touched
    for layers, message in ("0", "layer 0 is attention"), ("2", "layer 2 is mlp"), ("first:3", "only 2 layers"):
        with pytest.raises(UserError, match=message):
            expand(tmp_path / "model", tmp_path / "no", "grow_state", layers=layers, state_dim=8)
