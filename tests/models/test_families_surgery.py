"""Which surgery fits which family: a tiny checkpoint of the stock class, enlarged, computes the same and trains."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import longrecall
from tests.models.families.case import VOCABULARY, Case, filled
from tests.models.naive.case import Naive

ROWS: list[tuple[str, str, str, dict[str, Any]]] = [
    # Family, configuration, method, options.
    ("bamba", "published", "grow_state", {"factor": 2}),
    ("bamba", "everything", "add_retrieval", {"chunk": 4}),
    ("falcon_h1", "norm_after_gate", "grow_state", {"factor": 2}),
    ("falcon_h1", "published", "add_retrieval", {"chunk": 4}),
    ("falcon_mamba", "published", "add_retrieval", {"chunk": 4}),
    ("granitemoehybrid", "everything", "grow_state", {"state_dim": 9}),
    ("granitemoehybrid", "experts", "add_retrieval", {"chunk": 4}),
    ("jamba", "published", "add_retrieval", {"chunk": 4}),
    ("kimi_linear", "published", "subheads", {"factor": 2}),
    ("kimi_linear", "groups", "add_retrieval", {"chunk": 4}),
    ("zamba2", "published", "grow_state", {"factor": 2}),
    ("zamba2", "attention_adapters", "add_retrieval", {"chunk": 4}),
    ("nemotron_h", "everything", "grow_state", {"factor": 2}),
    ("nemotron_h", "experts", "add_retrieval", {"chunk": 4}),
    ("olmo_hybrid", "published", "subheads", {"factor": 2}),
    ("olmo_hybrid", "rotary", "add_retrieval", {"chunk": 4}),
    ("qwen3_5", "published_small", "subheads", {"factor": 2}),
    ("qwen3_5", "untied", "add_retrieval", {"chunk": 4}),
    ("qwen3_5_moe", "published", "subheads", {"factor": 2}),
    ("qwen3_next", "published", "subheads", {"factor": 2}),
    ("qwen3_next", "some_experts", "add_retrieval", {"chunk": 4}),
    ("recurrent_gemma", "published", "add_retrieval", {"chunk": 4}),
    ("rwkv", "published", "add_retrieval", {"chunk": 4}),
    ("naive.gated_deltaproduct", "published", "add_retrieval", {"chunk": 4}),
    ("naive.hgrn2", "hybrid", "add_retrieval", {"chunk": 4}),
    ("naive.hymba", "published", "add_retrieval", {"chunk": 4}),
    ("naive.kda", "published", "subheads", {"factor": 2}),
    ("naive.mom", "published", "add_retrieval", {"chunk": 4}),
    ("naive.rwkv6", "published", "add_retrieval", {"chunk": 4}),
    ("naive.rwkv7", "hybrid_with_computed_ranks", "add_retrieval", {"chunk": 4}),
]


def write_stock(family: str, name: str, folder: Path) -> None:
    """The checkpoint of a configuration: of the stock class, or of the model written out (naive)."""
    place = family if family.startswith("naive.") else f"families.{family}"
    cases: list[Case | Naive] = importlib.import_module(f"tests.models.{place}").CASES
    case = next(case for case in cases if case.name == name)
    if isinstance(case, Case):
        filled(case).save_pretrained(folder)
    else:
        case.write(folder, torch.ones(1, 2, dtype=torch.long))


@pytest.mark.parametrize(("family", "name", "method", "options"), ROWS, ids=lambda value: str(value))
def test_preserve_keeps_the_function_and_trains(
    family: str, name: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_stock(family, name, tmp_path / "stock")
    summary = longrecall.expand(
        tmp_path / "stock", tmp_path / "larger", method=method, layers="all", init="preserve", **options
    )
    old, new = longrecall.load(tmp_path / "stock"), longrecall.load(tmp_path / "larger")
    assert summary.parameters_after > summary.parameters_before
    tokens = torch.randint(1, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        # New channels and chunks add zeros to the same sums, which are formed in another order: float32 rounding.
        torch.testing.assert_close(new(tokens).logits, old(tokens).logits, rtol=1e-4, atol=1e-4)
    new.train()
    parameters = dict(new.named_parameters())
    loss = new(tokens, labels=tokens).loss
    assert loss is not None
    loss.backward()
    assert all(parameters[n].grad is not None for n in summary.touched if n in parameters)
    # As long a step as would make the loss smaller by 0.001 if it were a plane: steps of one size fit no two families,
    # and longer ones send tokens to other experts.
    slope = sum(float(p.grad.square().sum()) for p in parameters.values() if p.grad is not None)
    torch.optim.SGD(parameters.values(), lr=0.001 / slope).step()
    after = new(tokens, labels=tokens).loss
    assert after is not None and after.item() < loss.item()
