"""Weights that torchao has quantised: read by the steps where kernels can, left to torchao's own product elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

torchao = pytest.importorskip("torchao.quantization")

from longrecall import Engine  # noqa: E402
from longrecall.errors import UserError  # noqa: E402
from longrecall.inference import recorded_step  # noqa: E402
from longrecall.inference.as_built import why_not_as_built  # noqa: E402
from longrecall.inference.step import DecodingStep  # noqa: E402
from longrecall.models.recurrent_lm import RecurrentLM  # noqa: E402
from longrecall.serving import Bank  # noqa: E402
from tests.conftest import MIXERS  # noqa: E402
from tests.inference.test_decoding import model_of  # noqa: E402
from tests.inference.test_recorded_step import step_of  # noqa: E402

CONFIGS = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])


def quantised(model: RecurrentLM, kind: str = "int8", **options: Any) -> RecurrentLM:
    """The model itself, quantised in place."""
    torchao.quantize_(model, CONFIGS[kind](**options))
    return model


def dequantised(model: RecurrentLM) -> RecurrentLM:
    """A copy with plain weights of the numbers that the quantised ones stand for."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = nn.Parameter(module.weight.dequantize())
    return plain


def written(model: RecurrentLM, graphs: bool = True) -> Tensor:
    model.decoding.graphs = graphs
    return model.generate(PROMPT, max_new_tokens=16, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gla_conv", "int8"), ("gated_delta_net", "fp8"), ("parallel", "int8"), ("mla", "fp8")],
)
@torch.no_grad()
def test_steps_read_quantised_weights(name: str, kind: str) -> None:
    """In plain torch, in kernels for few rows and in those for many, from the state of torchao's own products."""
    model = quantised(model_of(MIXERS[name]), kind)
    assert why_not_as_built(model) is None
    plain = dequantised(model)
    for rows, fused in ((1, False), (1, True), *([(5, True)] if name == "gla_conv" else [])):
        found = []
        for one in (model, plain):
            step = DecodingStep(one, rows, fused=fused, room=8)
            step.load(one(PROMPT.expand(rows, -1)).past_key_values)
            step.ids.fill_(3)
            found.append(step().clone())
        # float32 sums of at most 64 terms in another order, the scale inside or outside of them, in two layers.
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_recorded_calls_give_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And notice that weights were quantised, and quantised anew: the wrappers have no address of their own."""
    monkeypatch.setattr(recorded_step, "PLAIN_FIRST", 1)
    model, other = model_of(MIXERS["gla_conv"]), model_of(MIXERS["gla_conv"], seed=5)
    first = written(model)
    before = step_of(model)
    quantised(model, kind)
    assert torch.equal(written(model), written(model, graphs=False))
    own = step_of(model)
    assert own is not before and own.calls is not None, own.why_plain
    assert torch.equal(written(model), written(model, graphs=False)) and step_of(model) is own
    quantised(other, kind)
    for module, source in zip(model.modules(), other.modules(), strict=True):
        if isinstance(module, nn.Linear):
            module.weight = source.weight
    found = written(model)
    assert torch.equal(found, written(model, graphs=False)) and not torch.equal(found, first)
    assert step_of(model) is not own


def test_an_engine_answers_as_generate() -> None:
    model = quantised(model_of(MIXERS["gla_conv"]))
    with Engine(model, slots=2) as engine:
        found = engine.submit(PROMPT[0].tolist(), max_new_tokens=16).result().ids
    assert [*PROMPT[0].tolist(), *found] == written(model)[0].tolist()


def test_fingerprints_tell_a_quantised_model_from_its_original(tmp_path: Path) -> None:
    model = model_of(MIXERS["gla"])
    bank = Bank(tmp_path, model)
    bank.add("text", [1, 2, 3])
    bank.state("text")
    found = [model.fingerprint()]
    for kind in CONFIGS:
        found.append(quantised(copy.deepcopy(model), kind).fingerprint())
        assert quantised(copy.deepcopy(model), kind).fingerprint() == found[-1]
    # The same bytes in another dtype, and other scales.
    for attribute, change in (
        ("scale", lambda scale: scale * 2),
        ("qdata", lambda data: data.view(torch.float8_e4m3fn)),
    ):
        other = quantised(copy.deepcopy(model))
        weight: Any = other.lm_head.weight
        setattr(weight, attribute, change(getattr(weight, attribute)))
        found.append(other.fingerprint())
    assert len(set(found)) == len(found)
    # The bank has the very model, and has looked at it already.
    quantised(model)
    with pytest.raises(UserError, match=f"holds the state of model {found[0][:12]}, but this model is {found[1][:12]}"):
        bank.state("text")
    bank.add("text", [1, 2, 3], force=True)
    assert bank.state("text").length == 3


def of_groups(model: RecurrentLM) -> None:
    quantised(model, granularity=torchao.PerGroup(8))


def with_activations(model: RecurrentLM) -> None:
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())


def of_another_float(model: RecurrentLM) -> None:
    quantised(model, "fp8", weight_dtype=torch.float8_e5m2)


def embeddings(model: RecurrentLM) -> None:
    torchao.quantize_(model, CONFIGS["fp8"](), filter_fn=lambda module, _: isinstance(module, nn.Embedding))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            of_groups,
            r"weight \(Int8Tensor\) that has scales \[\d+, \d\].*one float32 for each row \(PerRow\)",
        ),
        (with_activations, "quantises activations too"),
        (of_another_float, "has numbers of float8_e5m2; kernels read int8 and float8_e4m3fn"),
        (embeddings, r"of a kind that kernels cannot read \(Float8Tensor\)"),
    ],
)
def test_what_kernels_cannot_read_is_left_to_torchao(change: Any, reason: str) -> None:
    model = model_of(MIXERS["gla"])
    change(model)
    why = why_not_as_built(model)
    assert why is not None
    with pytest.raises(UserError, match=reason):
        DecodingStep(model, 1)
    assert torch.equal(written(model), written(model, graphs=False))


def test_retrieval_works_with_whole_weights() -> None:
    model = quantised(model_of(MIXERS["retrieval"]))
    assert "quantised weights in a layer that works with whole ones (Retrieval)" in str(why_not_as_built(model))
    torch.testing.assert_close(model(PROMPT).logits, dequantised(model)(PROMPT).logits, rtol=1e-5, atol=1e-5)
