"""What every format of fla's models has to pass, one test a configuration (tests/models/naive/).

As tests/models/test_families.py, but the reference is the model written out token by token in float64: fla's classes
need a GPU.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import longrecall
from tests.models import naive
from tests.models.naive.case import Naive, Weights
from tests.models.round_trip import assert_round_trip
from tests.models.test_families import close, ids, padding_and_packing, steps_are_one_pass

MODULES = [name for _, name, _ in pkgutil.iter_modules(naive.__path__)]
CASES: list[Naive] = [
    case for name in MODULES for case in getattr(importlib.import_module(f"{naive.__name__}.{name}"), "CASES", [])
]


def write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_configuration(case: Naive, tmp_path: Path) -> None:
    weights, tokens = Weights(), ids()
    expected = case.logits(case.config, weights, tokens)
    theirs = write(tmp_path / "theirs", case.config, weights.tensors)
    ours = longrecall.load(theirs)
    assert 0.3 < float(expected.std()) < 20, "logits too small or too large to tell two models apart"
    close(ours(tokens).logits, expected)
    steps_are_one_pass(ours, tokens, expected)
    padding_and_packing(ours, tokens, expected)
    assert_round_trip(theirs, tmp_path / "native")
    again = longrecall.load(tmp_path / "native")
    assert torch.equal(again(tokens).logits, ours(tokens).logits)
    if case.older is not None:
        older = write(tmp_path / "older", case.config, case.older(weights.tensors))
        assert torch.equal(longrecall.load(older)(tokens).logits, ours(tokens).logits)
        assert_round_trip(older, tmp_path / "older_native")
