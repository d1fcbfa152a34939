"""Models that are quantised as they are loaded: by whom, what stays, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import longrecall
from longrecall.cli.main import main
from longrecall.cli.quantize_option import KINDS
from longrecall.errors import UserError
from longrecall.inference.as_built import why_not_as_built
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.quantising import CONFIGS, quantise, quantised_as
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

with_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def model_of(**options: Any) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS["gla"], "mlp_size": 24}]
    return RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=32, **{"layers": layers, **options})).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantising") / "model"
    save(model_of(), path, tokenizer=byte_tokenizer())
    return path


def test_the_option_offers_every_kind() -> None:
    assert list(CONFIGS) == list(KINDS)


def test_an_unknown_kind(folder: Path) -> None:
    with pytest.raises(UserError, match='quantize "int9" is not one of int8, fp8'):
        longrecall.load(folder, quantize="int9")


def test_without_torchao(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["generate", str(folder), "--prompt", "a", "--quantize", "int8"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and "quantised weights need torchao: pip install " in told[0]


@with_torchao
@pytest.mark.parametrize("kind", CONFIGS)
def test_linear_layers_are_quantised_and_nothing_else(folder: Path, kind: str, tmp_path: Path) -> None:
    plain, model = longrecall.load(folder), longrecall.load(folder, quantize=kind)
    assert quantised_as(plain) is None and why_not_as_built(model) is None
    for name, module in model.named_modules():
        given = plain.get_submodule(name)
        for own, weight in module._parameters.items():
            if isinstance(module, nn.Linear) and own == "weight":
                found: Any = weight
                assert found.qdata.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
                # Half a step of a row's scale, which is its largest number / 127; the least step of 3 bits: 2**-4.
                off = (found.dequantize() - given.weight).abs()
                step = found.scale / 2 if kind == "int8" else given.weight.abs() / 16 + found.scale * 2**-10
                assert bool((off <= 1.001 * step).all())
            elif weight is not None:
                assert torch.equal(weight, given._parameters[own])
    # Nothing in the config would say what the weights are.
    for write in (lambda: model.save_pretrained(tmp_path / "new"), lambda: save(model, tmp_path / "new")):
        with pytest.raises(UserError, match=r"weights and cannot be saved\. Save it before it is quantised"):
            write()
    assert not (tmp_path / "new").exists()


@with_torchao
def test_tied_heads_and_layers_that_work_with_whole_weights() -> None:
    layers = [{"mixer": MIXERS["retrieval"], "mlp_size": 24}]
    model = model_of(layers=layers, tie_word_embeddings=True)
    before = model.model.embeddings.weight
    quantise(model, "int8")
    assert model.model.embeddings.weight is before and why_not_as_built(model) is None
    quantised = {
        name for name, module in model.named_modules() if type(getattr(module, "weight", 0)) is not nn.Parameter
    }
    assert {"lm_head", "model.layers.0.mlp.up_proj"} <= quantised
    assert type(model.model.layers[0].mixer.q_proj.weight) is nn.Parameter


@with_torchao
def test_the_verbs_read_quantised_models(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a state of one is not a state of the other."""
    state, result = tmp_path / "state.safetensors", tmp_path / "result.json"
    told = ["--prompt", "a b", "--save-state", str(state), "--quantize", "fp8"]
    assert main(["generate", str(folder), *told]) == 0, capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "c", "--load-state", str(state), "--quantize", "fp8"]) == 0
    capsys.readouterr()
    assert main(["generate", str(folder), "--prompt", "c", "--load-state", str(state)]) == 2
    assert "holds the state of model" in capsys.readouterr().err
    asked = ["--tasks", "phonebook", "--pairs", "2", "--lengths", "64", "--samples", "2", "--out", str(result)]
    assert main(["eval", str(folder), *asked, "--quantize", "int8"]) == 0, capsys.readouterr().err
    assert json.loads(result.read_text())["checkpoint"]["quantized"] == "int8"


@with_torchao
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_models_that_transformers_quantised(folder: Path, tmp_path: Path) -> None:
    """They decode by recorded calls too, and transformers saves and loads them; the fingerprint stays."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    ids = torch.tensor([[1, 2, 3]])

    def written(model: Any, graphs: bool) -> Tensor:
        model.decoding.graphs = graphs
        found: Tensor = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        return found

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()
    assert quantised_as(model) == "int8" and why_not_as_built(model) is None
    assert torch.equal(written(model, True), written(model, False))
    assert all(step.calls is not None for step in model.captured_steps.values())
    model.save_pretrained(tmp_path / "new")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert again.fingerprint() == model.fingerprint()
    with pytest.raises(UserError, match="open it with transformers"):
        longrecall.load(tmp_path / "new")
