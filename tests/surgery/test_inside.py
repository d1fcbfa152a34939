"""Surgery on mixers inside others: a branch of a parallel or hymba layer, the base of a retrieval layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.checkpoint import save
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery import expand
from longrecall.surgery.expansion import Operation
from longrecall.surgery.inside import path_to
from longrecall.surgery.method import Plan
from longrecall.surgery.registry import METHODS
from tests.surgery.conftest import MIXERS

Build = Callable[..., RecurrentLM]
ATTENTION, MAMBA2, GLA = MIXERS["attention"], MIXERS["mamba2_groups"], MIXERS["gla"]
FALCON: dict[str, Any] = {
    "type": "parallel",
    "attention": ATTENTION,
    "ssm": MAMBA2 | {"part_multipliers": [0.5, 1.25, 0.75, 1.5, 2.0]},
    "ssm_input_multiplier": 1.5,
    "attention_output_multiplier": 0.5,
}
RETRIEVAL = {"type": "retrieval", "chunk": 5, "top_k": 2, "encoder_dim": 12, "num_heads": 4, "head_dim": 6}
INSIDE = {
    "parallel": (FALCON, "grow_state", ("ssm",)),
    "hymba": ({"type": "hymba", "attention": ATTENTION, "ssm": MAMBA2}, "grow_state", ("ssm",)),
    "third": ({"type": "hymba", "attention": ATTENTION, "ssm": MAMBA2, "third": GLA}, "merge_heads", ("third",)),
    "retrieval": (RETRIEVAL | {"base": FALCON}, "grow_state", ("base", "ssm")),
}


def plan_of(mixer: dict[str, Any], method: str, init: str, layer: int = 0) -> Plan:
    """The plan of a layer as a config holds it, with its defaults."""
    return Operation.check(method, init, {}, 0).plan(layer, mixer_config(mixer).to_dict())


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (mixer, _, _) in INSIDE.items():
        monkeypatch.setitem(MIXERS, name, mixer)


@pytest.mark.parametrize("name", INSIDE)
def test_the_mixer_inside_grows_and_the_function_stays(build: Build, operate: Build, tokens: Tensor, name: str) -> None:
    mixer, method, path = INSIDE[name]
    assert path_to(METHODS[method], mixer) == path
    model = build(name, "attention")
    grown = operate(model, method, (0,), "preserve")
    with torch.no_grad():
        before, after = model(tokens).logits, grown(tokens).logits
    # As in the contract: 1e-5 for grow_state, 1e-4 of the size for merged heads; only orders of summation change.
    limit = 1e-5 if method == "grow_state" else 1e-4 * float(before.abs().max())
    assert before.abs().max() > 0.1 and float((before - after).abs().max()) <= limit
    # The contract's first two steps: what was touched exists in the new model and lives.
    touched = [f"model.layers.0.{n}" for n in plan_of(mixer, method, "preserve").touched]
    optimizer, alive = torch.optim.AdamW(grown.parameters(), lr=1e-2), {n: 0.0 for n in touched}
    for _ in range(2):
        optimizer.zero_grad()
        grown(tokens, labels=tokens).loss.backward()
        for n in touched:
            alive[n] = alive[n] + grown.get_parameter(n).grad.abs()
        optimizer.step()
    assert touched and all(n.startswith(f"model.layers.0.mixer.{'.'.join(path)}.") for n in touched)
    assert all(bool((gradient > 0).all()) for gradient in alive.values())


def test_a_reinitialised_layer_names_its_own_norm(build: Build, operate: Build) -> None:
    for layer in (RETRIEVAL | {"base": GLA}, INSIDE["third"][0]):
        plan = plan_of(layer, "merge_heads", "reinit")
        assert "mixer_norm.weight" in plan.touched and not any(".mixer_norm" in name for name in plan.touched)


def test_what_does_not_fit_is_refused_in_words() -> None:
    with pytest.raises(UserError, match="layer 3 is a parallel layer, and a mixer inside one cannot hand over"):
        plan_of(FALCON, "grow_state", "handover", 3)
    with pytest.raises(UserError, match="layer 3 is parallel, but merge_heads fits gla, retnet"):
        plan_of(FALCON, "merge_heads", "preserve", 3)


def test_expand_reads_and_writes_it(build: Build, tokens: Tensor, tmp_path: Path) -> None:
    model = build("parallel", "parallel")
    save(model, tmp_path / "base")
    summary = expand(tmp_path / "base", tmp_path / "out", method="grow_state", layers="0", factor=2)
    grown = load(tmp_path / "out")
    assert grown.config.layers[0]["mixer"]["ssm"]["state_dim"] == 2 * MAMBA2["state_dim"]
    assert summary.state_after == grown.state_size() == model.state_size() * 3 // 2
    with torch.no_grad():
        # Only the order of summation over the state changes.
        torch.testing.assert_close(grown(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
