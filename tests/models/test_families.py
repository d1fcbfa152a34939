"""What every format of transformers' own classes has to pass, one test a configuration (tests/models/families/).

Logits as the stock class has them; a prefill and steps as one pass; left padding and packed documents without a leak;
read, written, loaded by the stock class: every tensor bit for bit, the config equal but for defaults.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longrecall
from longrecall.inference.step import DecodingStep
from longrecall.models.recurrent_lm import RecurrentLM
from tests.models import families
from tests.models.families.case import VOCABULARY, Case, filled
from tests.models.round_trip import assert_round_trip

MODULES = [name for _, name, _ in pkgutil.iter_modules(families.__path__) if name != "case"]
CASES: list[Case] = [case for name in MODULES for case in importlib.import_module(f"{families.__name__}.{name}").CASES]
LENGTH, SPLIT = 13, 7


def ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    # Token 0 is for padding: some stock classes look for it.
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


def close(found: Tensor, expected: Tensor) -> None:
    """float32 sums in another order, of logits of size 1 to 5: the bound that users are promised."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_configuration(case: Case, tmp_path: Path) -> None:
    stock, tokens = filled(case), ids()
    # A forward pass of RWKV-4's class divides weights in memory.
    stored = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    stock.save_pretrained(tmp_path / "theirs")
    ours = longrecall.load(tmp_path / "theirs")
    expected = stock(tokens, use_cache=False).logits
    assert 0.3 < float(expected.std()) < 20, "logits too small or too large to tell two models apart"
    close(ours(tokens).logits, expected)
    steps_are_one_pass(ours, tokens, expected)
    padding_and_packing(ours, tokens, expected)
    written_and_loaded(stock, stored, ours, tokens, expected, tmp_path)


def steps_are_one_pass(model: RecurrentLM, tokens: Tensor, expected: Tensor) -> None:
    state = model(tokens[:, :SPLIT]).past_key_values
    step = DecodingStep(model, len(tokens), fused=False, room=LENGTH + 1)
    step.load(state)
    for column in range(SPLIT, LENGTH):
        out = model(tokens[:, column : column + 1], past_key_values=state)
        state = out.past_key_values
        close(out.logits[:, 0], expected[:, column])
        step.ids.copy_(tokens[:, column])
        close(step(), expected[:, column])


def padding_and_packing(model: RecurrentLM, tokens: Tensor, expected: Tensor) -> None:
    """One row padded more than the other, on the left; both as documents of one row, the shorter one first."""
    padded = torch.zeros(2, LENGTH + 2, dtype=torch.long)
    mask = torch.zeros(2, LENGTH + 2, dtype=torch.long)
    short = LENGTH - 4
    padded[0, -short:], padded[1, -LENGTH:] = tokens[0, :short], tokens[1]
    mask[0, -short:], mask[1, -LENGTH:] = 1, 1
    logits = model(padded, attention_mask=mask).logits
    close(logits[0, -short:], expected[0, :short])
    close(logits[1, -LENGTH:], expected[1])
    alone = model(padded[1:], attention_mask=mask[1:]).logits
    close(alone[0, -LENGTH:], expected[1])
    row = torch.cat([tokens[0, :short], tokens[1]])[None]
    positions = torch.cat([torch.arange(short), torch.arange(LENGTH)])[None]
    packed = model(row, position_ids=positions).logits[0]
    close(packed[:short], expected[0, :short])
    close(packed[short:], expected[1])


FIRST = [case for index, case in enumerate(CASES) if case.format not in {other.format for other in CASES[:index]}]


@pytest.mark.parametrize("case", FIRST, ids=str)
@torch.no_grad()
def test_greedy_generation_is_the_stock_class_s(case: Case, tmp_path: Path) -> None:
    stock, tokens = filled(case), ids()
    stock.save_pretrained(tmp_path)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # Without its cache: some stock classes lose a part of their state between steps.
    expected = stock.generate(tokens, use_cache=False, **asked)
    assert torch.equal(longrecall.load(tmp_path).generate(tokens, **asked), expected)


def written_and_loaded(
    stock: Any, stored: dict[str, Tensor], ours: RecurrentLM, tokens: Tensor, expected: Tensor, tmp_path: Path
) -> None:
    assert_round_trip(tmp_path / "theirs", tmp_path / "native")
    again = longrecall.load(tmp_path / "native")
    assert torch.equal(again(tokens).logits, ours(tokens).logits)
    loaded, report = type(stock).from_pretrained(
        tmp_path / "native" / "stock", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    for name, tensor in stored.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded(tokens, use_cache=False).logits, expected)
    assert without_provenance(loaded.config) == without_provenance(stock.config)


def without_provenance(config: Any) -> Any:
    """The values of a config, those of its sections too."""
    if not isinstance(config, dict):
        config = config.to_dict()
    left_out = ("_name_or_path", "transformers_version", "dtype", "architectures")
    return {k: without_provenance(v) if isinstance(v, dict) else v for k, v in config.items() if k not in left_out}
