"""Checkpoints as models: types, devices, independence of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.errors import UserError
from longrecall.models.checkpoint import Checkpoint, open_checkpoint, save
from longrecall.models.loading import load, materialise, parse_dtype
from tests.models.checkpoints import (
    HANDOVER,
    config_of,
    logits,
    model_of,
    write,
)


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
