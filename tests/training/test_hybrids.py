"""Every intervention on hybrids: blocks of all kinds side by side, and what attention layers carry on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.initial_states import InitialState
from longrecall.training.recipe import Recipe
from longrecall.training.segments import Segments, read_batch
from longrecall.training.summary import trained_shapes
from tests.hybrids import HYBRIDS, hybrid, save_hybrid
from tests.training.interventions import intervene, override
from tests.training.runs import equal, train, weights

EVERY = pytest.mark.parametrize("name", HYBRIDS)
TEXT = torch.tensor([True, True, False])
STARTS = ((0, 5), (7,), (0,))


def batch(number: int, length: int = 13) -> Tensor:
    return torch.randint(0, 256, (3, length), generator=torch.Generator().manual_seed(number))


def run(model: RecurrentLM, initial: InitialState, batches: range, apart: bool = False) -> list[Tensor]:
    """Plain steps of gradient descent; returns the losses."""
    losses = []
    for number in batches:
        segments = Segments.of(STARTS, 13) if apart or initial.continues else None
        loss = read_batch(model, batch(number), batch(number), TEXT, initial, segments)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in HYBRIDS for kind in ("state_passing", "truncated_bptt", "learned")),
        *((name, kind) for name in ("falcon", "rwkv") for kind in ("noise", "fitted_noise")),
    ],
)
def test_every_intervention_with_checkpointed_layers(name: str, kind: str) -> None:
    plain, saving = hybrid(name).train(), hybrid(name).train()
    # As the verb calls it: 5.23 renamed it.
    (getattr(saving, "activation_checkpointing_enable", None) or saving.gradient_checkpointing_enable)()
    apart = kind == "learned"
    expected = run(plain, intervene(kind, plain), range(2), apart)
    found = run(saving, intervene(kind, saving), range(2), apart)
    # The same operations twice; only the order of additions into a gradient may differ. Losses are about 6.
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-4)


@EVERY
@pytest.mark.parametrize("kind", ["truncated_bptt", "state_passing"])
@torch.no_grad()
def test_rows_that_carry_their_window_read_as_one_text(name: str, kind: str) -> None:
    """As long as the window covers what was read; a smaller one changes what full attention sees."""
    model, text = hybrid(name), batch(0, 30)
    whole = model(text).logits
    for window in (30, 1000):
        initial, read = intervene(kind, model, attention_window=window), []
        for part in text.split(10, dim=1):
            out = model(part, past_key_values=initial.before_batch(torch.tensor([True] * 3)))
            initial.after_batch(out.past_key_values)
            read.append(out.logits)
        # float32; sums in another order.
        torch.testing.assert_close(torch.cat(read, 1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_window_has_the_newest_tokens_alone() -> None:
    model = hybrid("qwen")
    initial = intervene("truncated_bptt", model, attention_window=4)
    for number in range(2):
        segments = Segments.of(STARTS if number == 0 else ((), (), ()), 13)
        read_batch(model, batch(number), batch(number), torch.tensor([True] * 3), initial, segments)
        cache = initial.state_dict()
        assert cache["carried.1.key"].shape == (3, 4, 2, 8)
        # Row 0 goes on with the document of column 5, row 1 with that of column 7.
        last = torch.tensor([[8], [6], [13]]) + 13 * number
        assert torch.equal(cache["carried.1.position"], last + torch.arange(-4, 0))


@torch.no_grad()
def test_a_document_that_starts_sees_no_empty_column_of_a_window() -> None:
    """A row that was carried on is cut at its start: keys of zeros there would be seen like tokens."""
    model = hybrid("qwen")
    initial = intervene("truncated_bptt", model, attention_window=8)
    every = torch.tensor([True] * 3)
    read_batch(model, batch(0), batch(0), every, initial, Segments.of(((0,),) * 3, 13))
    fresh = read_batch(model, batch(1), batch(1), every, initial, Segments.of(((0,),) * 3, 13))
    assert fresh == model(batch(1), labels=batch(1)).loss
    started = read_batch(model, batch(2), batch(2), TEXT, initial, Segments.of(((0,), (0,), ()), 13))
    assert started == model(batch(2), labels=batch(2)).loss


@pytest.mark.parametrize("kind", ["truncated_bptt", "state_passing"])
def test_a_carried_window_is_resumed_bit_for_bit(kind: str) -> None:
    options = {"attention_window": 6, "probability": 0.7}
    model = hybrid("qwen")
    initial = intervene(kind, model, **options)
    run(model, initial, range(2))
    stored = save({name: tensor.clone() for name, tensor in model.state_dict().items()}), save(initial.state_dict())
    expected = run(model, initial, range(2, 4))
    again = hybrid("qwen", seed=5)
    resumed = intervene(kind, again, **options)
    again.load_state_dict(load(stored[0]))
    resumed.load_state_dict(load(stored[1]))
    assert torch.equal(torch.stack(run(again, resumed, range(2, 4))), torch.stack(expected))


def recipe(name: str, tmp_path: Path, *overrides: str) -> Recipe:
    """Two steps over text and phone books; surgery has touched the first mixer's tensors."""
    if not (tmp_path / "model").exists():
        touched = [key for key in hybrid(name).state_dict() if key.startswith("model.layers.0.mixer.")]
        save_hybrid(name, tmp_path / "model", [{"method": "grow_state", "touched": touched}])
        (tmp_path / "text.txt").write_text("\f".join(f"The {i}th fox met a dog.\n" * (20 + i) for i in range(6)))
    text = {"kind": "text", "path": str(tmp_path / "text.txt")}
    data = {
        "model": {"checkpoint": str(tmp_path / "model")},
        "data": {"context_length": 48, "sources": [text, {"kind": "phonebook", "pairs": [2, 4], "weight": 0.5}]},
        "optimizer": {"learning_rate": 0.01, "touched": "3x", "warmup": 1},
        "run": {"output": str(tmp_path / "out"), "steps": 2, "batch_size": 2, "gradient_accumulation": 2}
        | {"log_every": 1, "report_to": "none"},
    }
    return Recipe.from_dict(data, overrides)


@pytest.mark.parametrize("name", ["nemotron", "falcon"])
def test_a_run_reports_the_balance_loss_and_resumes(name: str, tmp_path: Path) -> None:
    options = (override("state_passing", attention_window=32), "run.save_every=1", "run.steps=2")
    whole = train(recipe(name, tmp_path, *options, f"run.output={tmp_path}/whole"))
    balanced = name == "nemotron"
    assert all(("auxiliary_loss" in row) is balanced for row in whole)
    if balanced:
        # One layer that balances well adds its weight, 0.001; a loss by tokens would be thousands of it.
        layers = sum("moe" in json.dumps(layer) for layer in HYBRIDS[name]["layers"])
        assert all(0.8 * 1e-3 * layers < row["auxiliary_loss"] < 4e-3 * layers for row in whole)
    # A stopped run: what the first of two steps left.
    newest = tmp_path / "whole" / "steps" / "step-00000002"
    expected = weights(tmp_path / "whole" / "final")
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink()
    newest.rmdir()
    assert train(recipe(name, tmp_path, *options, f"run.output={tmp_path}/whole"), resume=True) == whole
    assert equal(weights(tmp_path / "whole" / "final"), expected)


def test_a_window_of_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"attention_window.* must be at least 1"):
        recipe("qwen", tmp_path, override("state_passing", attention_window=0))
    with pytest.raises(UserError, match="attention_window"):
        recipe("qwen", tmp_path, override("noise", std=1.0, attention_window=4))
    found = recipe("qwen", tmp_path, override("truncated_bptt", attention_window="4k")).initial_state
    assert found.attention_window == 4096


@EVERY
def test_the_plan_counts_what_is_trained(name: str, tmp_path: Path) -> None:
    """From the config alone; what a checkpoint holds beside parameters (the correction of a router) is none of it."""
    save_hybrid(name, tmp_path / "model")
    planned = trained_shapes(recipe(name, tmp_path), open_checkpoint(tmp_path / "model"))
    trained = {key: tuple(p.shape) for key, p in hybrid(name).named_parameters() if p.requires_grad}
    assert planned == trained
