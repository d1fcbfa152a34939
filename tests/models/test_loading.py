"""Checkpoints as models: types, devices, independence of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from longrecall.errors import UserError
from longrecall.models.checkpoint import Checkpoint, open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.loading import load, materialise, parse_dtype, start_of_text
from longrecall.models.recurrent_layer import RecurrentLayer
from longrecall.models.recurrent_lm import RecurrentLM
from tests.models.checkpoints import (
    HANDOVER,
    config_of,
    logits,
    model_of,
    write,
)
from tests.models.test_memory_tokens import MEMORY, MODELS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("auto", None),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("torch.float16", torch.float16),
        ("fp32", torch.float32),
        ("float64", torch.float64),
    ],
)
def test_dtype_names(given: Any, expected: torch.dtype | None) -> None:
    assert parse_dtype(given) == expected


@pytest.mark.parametrize("dtype", ["bfloat61", "int8", torch.int64, ""])
def test_unknown_dtype(dtype: Any, tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    with pytest.raises(UserError, match=r"^dtype"):
        load(tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "nowhere:0"])
def test_unusable_device(device: str, tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    with pytest.raises(UserError, match=f'device "{device}" cannot be used'):
        load(tmp_path / "out", device=device)


def test_dtype_changes_weights_but_not_progress(tmp_path: Path) -> None:
    model = model_of(HANDOVER, tied=True)
    progress = "model.layers.0.mixer.progress"
    model.get_buffer(progress).fill_(0.3)
    save(model, tmp_path / "out")
    again = load(tmp_path / "out", dtype="bf16")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    # 0.3 is no bfloat16 number: only an untouched float32 keeps it.
    assert torch.equal(again.get_buffer(progress), torch.tensor(0.3))


def test_loaded_model_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    model = load(tmp_path / "out")
    before = logits(model)
    write(tmp_path / "out", config_of(), force=True)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert open_checkpoint(tmp_path / "out").read("model.norm.weight").any()


def test_open_checkpoint_can_be_loaded_without_opening_again(tmp_path: Path) -> None:
    model = model_of()
    save(model, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert isinstance(found, Checkpoint)
    assert materialise(found).fingerprint() == model.fingerprint()


@pytest.mark.parametrize("name", MODELS)
def test_memory_tokens_are_read_layer_by_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they leave is what the whole model computes; embeddings, norm and head are not read at all."""
    torch.manual_seed(0)
    config = RecurrentConfig(vocab_size=258, hidden_size=20, layers=MODELS[name], memory_tokens=MEMORY)
    save(RecurrentLM(config), tmp_path / "model")
    expected = load(tmp_path / "model").zero_state(1)
    read, met = [], []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, key: read.append(key) or original(self, key))

    def look(module: nn.Module, *_: Any) -> None:
        if isinstance(module, RecurrentLayer):
            assert all(parameter.is_meta for other in met for parameter in other.parameters())
            met.append(module)

    with register_module_forward_pre_hook(look):
        found = start_of_text(open_checkpoint(tmp_path / "model"))
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert (found.position, found.length) == (expected.position, expected.length)
    assert len(met) == len(config.layers)
    wanted = [key for key in config.tensor_shapes() if key.startswith(("model.layers.", "model.memory"))]
    assert sorted(read) == sorted(wanted)
