"""What every format of fla's models has to pass, one test a configuration (tests/models/naive/).

As tests/models/test_families.py, but the reference is the model written out token by token in float64: fla's classes
need a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import longrecall
from tests.models import naive
from tests.models.naive.case import Naive
from tests.models.round_trip import assert_round_trip
from tests.models.test_families import close, ids, padding_and_packing, steps_are_one_pass

MODULES = [name for _, name, _ in pkgutil.iter_modules(naive.__path__)]
CASES: list[Naive] = [
    case for name in MODULES for case in getattr(importlib.import_module(f"{naive.__name__}.{name}"), "CASES", [])
]


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_configuration(case: Naive, tmp_path: Path) -> None:
    theirs, tokens = tmp_path / "theirs", ids()
    expected = case.write(theirs, tokens)
    ours = longrecall.load(theirs)
    assert 0.3 < float(expected.std()) < 20, "logits too small or too large to tell two models apart"
    close(ours(tokens).logits, expected)
    steps_are_one_pass(ours, tokens, expected)
    padding_and_packing(ours, tokens, expected)
    assert_round_trip(theirs, tmp_path / "native")
    again = longrecall.load(tmp_path / "native")
    assert torch.equal(again(tokens).logits, ours(tokens).logits)
    if case.older is not None:
        case.write(tmp_path / "older", tokens, older=True)
        assert torch.equal(longrecall.load(tmp_path / "older")(tokens).logits, ours(tokens).logits)
        assert_round_trip(tmp_path / "older", tmp_path / "older_native")
