"""Whole models of the RWKV family and HGRN2: channel mixing with a state, norms with biases, values handed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import RwkvConfig, RwkvForCausalLM

from longrecall.inference.step import DecodingStep
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

D, VOCABULARY = 12, 40
NORM = {"kind": "layer", "bias": True, "eps": 1e-5}
SHIFTED = {"input_dim": D, "inner_dim": 20}
RWKV7 = {"type": "rwkv7", "input_dim": D, "num_heads": 3, "key_dim": 4, "value_dim": 4, "decay_rank": 2} | {
    "rate_rank": 3,
    "gate_rank": 5,
}
RWKV6 = {"type": "rwkv6", "input_dim": D, "num_heads": 2, "key_dim": 3, "value_dim": 6, "mix_rank": 3, "decay_rank": 2}
HGRN2 = {"type": "hgrn2", "num_heads": 3, "key_dim": 4, "value_dim": 4}


def layer(mixer: dict[str, Any], channel: str) -> dict[str, Any]:
    module = {"type": channel, **SHIFTED}
    return {
        "blocks": [
            {"name": "mixer", "module": mixer, "norm": NORM},
            {"name": "mlp", "module": module, "norm": NORM},
        ]
    }


def config(layers: list[dict[str, Any]], **more: Any) -> RecurrentConfig:
    return RecurrentConfig(vocab_size=VOCABULARY, hidden_size=D, layers=layers, tie_word_embeddings=False, **more)


LAYER_NORMS = {"embedding_norm": NORM, "final_norm": NORM}
MODELS = {
    "rwkv4": config([layer({"type": "rwkv4", **SHIFTED}, "rwkv4_channel")] * 3, **LAYER_NORMS),
    "rwkv6": config([layer(RWKV6, "rwkv6_channel")] * 2, **LAYER_NORMS),
    "rwkv7": config(
        [
            layer(RWKV7 | {"gives_values": True}, "rwkv7_channel"),
            *[layer(RWKV7 | {"value_rank": 2}, "rwkv7_channel")] * 2,
        ],
        **LAYER_NORMS,
    ),
    "hgrn2": config(
        [
            {"mixer": HGRN2 | {"bound_rows": 3}, "mlp_size": 16},
            *({"mixer": HGRN2 | {"bound_row": row}, "mlp_size": 16} for row in (1, 2)),
        ]
    ),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> RecurrentLM:
    torch.manual_seed(0)
    model = RecurrentLM(MODELS[name]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def ids(length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@EVERY
@torch.no_grad()
def test_segments_padding_and_packed_documents(name: str) -> None:
    model, tokens = build(name), ids(11)
    whole = model(tokens).logits
    # float64 throughout, chunks cut elsewhere; norms of small heads enlarge rounding.
    first = model(tokens[:, :6])
    rest = model(tokens[:, 6:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-8, atol=1e-8)
    mask = F.pad(torch.ones_like(tokens), (4, 0))
    padded = model(F.pad(tokens, (4, 0), value=7), attention_mask=mask).logits[:, 4:]
    torch.testing.assert_close(padded, whole, rtol=1e-8, atol=1e-8)
    packed = model(tokens.reshape(1, -1), cu_seqlens=torch.tensor([0, 11, 22])).logits
    torch.testing.assert_close(packed.view_as(whole), whole, rtol=1e-8, atol=1e-8)


@EVERY
@torch.no_grad()
def test_a_decoding_step_equals_one_pass(name: str) -> None:
    model, tokens = build(name), ids(9)
    expected = model(tokens).logits
    step = DecodingStep(model, 2, torch.float64, fused=False)
    step.load(model(tokens[:, :5]).past_key_values)
    for t in range(5, 9):
        # float64, one token at a time.
        step.ids.copy_(tokens[:, t])
        torch.testing.assert_close(step(), expected[:, t], rtol=1e-8, atol=1e-8)


@EVERY
def test_gradients_with_checkpointing_are_the_same(name: str) -> None:
    model, tokens = build(name).train(), ids(7)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert bool(plain.any())
        # float64, the same sums.
        torch.testing.assert_close(again, plain, rtol=1e-9, atol=1e-12)


def as_native(theirs: RwkvForCausalLM) -> dict[str, Tensor]:
    """The tensors of transformers' RWKV-4 under our names."""
    letters = {"key": "k", "value": "v", "receptance": "r", "output": "o"}
    found = {}
    for key, tensor in theirs.state_dict().items():
        parts = key.split(".")
        if key == "head.weight":
            name = "lm_head.weight"
        elif "blocks" not in parts:
            name = key.replace("rwkv.embeddings", "model.embeddings").replace("rwkv.ln_out", "model.norm")
        elif parts[3] == "pre_ln":
            name = f"model.embedding_norm.{parts[4]}"
        elif parts[3] in ("ln1", "ln2"):
            name = f"model.layers.{parts[2]}.{'mixer' if parts[3] == 'ln1' else 'mlp'}_norm.{parts[4]}"
        else:
            inner = parts[4]
            if inner.startswith("time_mix_"):
                inner = f"mix_{letters[inner.removeprefix('time_mix_')]}"
            elif inner.startswith("time_"):
                inner = {"time_decay": "decay", "time_first": "bonus"}[inner]
            else:
                inner = f"{letters[inner]}_proj.weight"
            name = f"model.layers.{parts[2]}.{'mixer' if parts[3] == 'attention' else 'mlp'}.{inner}"
        found[name] = tensor.reshape(-1) if tensor.dim() == 3 else tensor
    return found


@pytest.mark.parametrize(("inner", "wide", "layers", "rescale"), [(None, None, 2, 0), (20, 28, 4, 2), (8, 16, 3, 1)])
@torch.no_grad()
def test_rwkv4_is_that_of_transformers(inner: int | None, wide: int | None, layers: int, rescale: int) -> None:
    torch.manual_seed(0)
    theirs = RwkvForCausalLM(
        RwkvConfig(
            vocab_size=VOCABULARY,
            hidden_size=D,
            attention_hidden_size=inner,
            intermediate_size=wide,
            num_hidden_layers=layers,
            rescale_every=rescale,
        )
    )
    for parameter in theirs.parameters():
        parameter.normal_(std=0.5)
    held = {name: tensor.clone() for name, tensor in as_native(theirs).items()}

    def norm(index: int) -> dict[str, Any]:
        # When they do not train, they halve the stream every `rescale` layers: a norm of it has a quarter of the eps.
        return NORM | {"eps": 1e-5 * 4 ** (index // rescale if rescale else 0)}

    described = []
    for index in range(layers):
        one = layer({"type": "rwkv4", "input_dim": D, "inner_dim": inner or D}, "rwkv4_channel")["blocks"]
        one[1] |= {"module": {"type": "rwkv4_channel", "input_dim": D, "inner_dim": wide or 4 * D}}
        described.append({"blocks": [block | {"norm": norm(index)} for block in one]})
    model = RecurrentLM(config(described, embedding_norm=NORM, final_norm=norm(layers))).eval()
    model.load_state_dict(held)
    tokens = ids(30)
    # Their cache is as wide as the stream, whatever attention_hidden_size is.
    expected = theirs.eval()(tokens, use_cache=False).logits
    # float32, averages by another recurrence.
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
