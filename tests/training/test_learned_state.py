"""A learned initial state: what trains, what stays, and the file that it becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import longrecall
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from tests.conftest import MIXERS
from tests.training.interventions import intervene, override
from tests.training.runs import Killed, equal, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]
ModelMaker = Callable[..., RecurrentLM]
STATE_TUNING = override("learned", learning_rate=0.3)


def learned_file(recipe: Recipe) -> Path:
    return Path(recipe.run.output) / "initial_state.safetensors"


def test_state_tuning_lowers_the_loss_and_leaves_every_weight_alone(make_recipe: MakeRecipe, base: Path) -> None:
    recipe = make_recipe(STATE_TUNING, "run.steps=30", "optimizer.schedule=constant")
    summary = run_recipe(recipe, show_progress=False)
    assert summary.first_loss is not None and summary.last_loss is not None
    # Only the state moves: far less than with the weights, but 30 steps of an untrained model are no noise (0.005).
    assert summary.last_loss < summary.first_loss - 0.03
    assert equal(weights(Path(summary.checkpoint)), weights(base))
    assert [(group.name, group.parameters, group.learning_rate) for group in summary.groups] == [
        # Mamba-2: 2 heads of 4 x 16 and 40 channels x 3; GLA: 2 heads of 4 x 8 and 8 + 8 + 16 channels x 2.
        ("initial state", 128 + 40 * 3 + 64 + 32 * 2, 0.3)
    ]
    assert summary.initial_state == str(learned_file(recipe))
    assert learned_file(recipe).stat().st_size < 4096


def test_the_state_is_for_the_trained_model_and_no_other(
    make_recipe: MakeRecipe, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(override("learned", freeze=False))
    summary = run_recipe(recipe, show_progress=False)
    model = longrecall.load(summary.checkpoint)
    state = RecurrentState.load(learned_file(recipe), model)
    assert (state.position.tolist(), state.length) == ([0], 0)
    assert all(bool(tensor.any()) for layer in state.layers for tensor in layer.values())
    ids = torch.tensor([list(b"The 7th fox")])
    with torch.no_grad():
        assert (model(ids, past_key_values=state).logits - model(ids).logits).abs().max() > 1e-3
    # The command gives the very tokens that the model gives from this state; the prompt opens as without a state.
    command = ["generate", summary.checkpoint, "--prompt", "The 7th fox", "--max-new-tokens", "5", "--json"]
    assert main([*command, "--load-state", str(learned_file(recipe))]) == 0
    told = json.loads(capsys.readouterr().out)
    prompt = byte_tokenizer().encode("The 7th fox", add_special_tokens=True)
    assert (told["tokens_before"], told["prompt_tokens"]) == (0, len(prompt))
    written = model.generate(torch.tensor([prompt]), past_key_values=state, max_new_tokens=5, do_sample=False)
    assert told["text"] == byte_tokenizer().decode(written[0, len(prompt) :], skip_special_tokens=True)
    with pytest.raises(UserError, match="holds the state of model"):
        RecurrentState.load(learned_file(recipe), longrecall.load(base))


def test_a_frozen_model_and_its_base_take_the_same_state(make_recipe: MakeRecipe, base: Path) -> None:
    recipe = make_recipe(STATE_TUNING)
    run_recipe(recipe, show_progress=False)
    assert RecurrentState.load(learned_file(recipe), longrecall.load(base)).batch_size == 1


def test_a_killed_run_ends_with_the_same_state_and_a_finished_one_writes_it_again(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = make_recipe(STATE_TUNING, "run.save_every=2", f"run.output={tmp_path / 'whole'}")
    expected = train(whole)
    recipe = make_recipe(STATE_TUNING, "run.save_every=2")
    with monkeypatch.context() as patch:
        kill_after(patch, 7)
        with pytest.raises(Killed):
            train(recipe)
    assert not learned_file(recipe).exists()
    assert train(recipe, resume=True) == expected
    assert equal(load_file(learned_file(recipe)), load_file(learned_file(whole)))
    learned_file(recipe).unlink()
    assert run_recipe(recipe, resume=True, show_progress=False).resumed_from == 6
    assert equal(load_file(learned_file(recipe)), load_file(learned_file(whole)))


def test_after_a_handover_the_state_is_that_of_the_new_path(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = {"type": "mamba2", "inner_dim": 32, "head_dim": 16, "state_dim": 4}
    config = longrecall.RecurrentConfig(
        vocab_size=258,
        hidden_size=16,
        layers=[
            {"mixer": {"type": "handover", "old": old, "new": {**old, "state_dim": 8}}, "mlp_size": 0},
            {"mixer": old, "mlp_size": 0},
        ],
    )
    record = {"method": "grow_state", "init": "handover", "touched": []}
    save(RecurrentLM(config), tmp_path / "handing", byte_tokenizer(), [record])
    recipe = make_recipe(f"model.checkpoint={tmp_path / 'handing'}", STATE_TUNING)
    summary = run_recipe(recipe, show_progress=False)
    state = RecurrentState.load(learned_file(recipe), longrecall.load(summary.checkpoint))
    assert {name: tuple(t.shape) for name, t in state.layers[0].items()} == {
        "recurrent": (1, 2, 8, 16),
        "conv": (1, 48, 3),
    }
    assert all(bool(tensor.any()) for layer in state.layers for tensor in layer.values())


def test_bfloat16_weights_learn_a_float32_state(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(STATE_TUNING, "model.dtype=bfloat16")
    summary = run_recipe(recipe, show_progress=False)
    state = RecurrentState.load(learned_file(recipe), longrecall.load(summary.checkpoint))
    assert {name: tensor.dtype for name, tensor in state.layers[0].items()} == {
        "recurrent": torch.float32,
        "conv": torch.bfloat16,
    }


def test_a_batch_without_chosen_rows_still_has_a_gradient(make_model: ModelMaker) -> None:
    """Data parallelism would wait for it for ever."""
    model = make_model()
    initial = intervene("learned", model, probability=0.0)
    state = initial.before_batch(torch.ones(2, dtype=torch.bool))
    loss = model(torch.zeros(2, 5, dtype=torch.long), labels=torch.ones(2, 5, dtype=torch.long), past_key_values=state)
    loss.loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith("initial_state.") for name in trained)
    assert all(gradient is not None and not bool(gradient.any()) for gradient in trained.values())


def test_a_model_without_recurrence_has_nothing_to_learn(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS["attention"], "mlp_size": 8}]
    model = RecurrentLM(longrecall.RecurrentConfig(vocab_size=258, hidden_size=16, layers=layers))
    save(model, tmp_path / "attention", byte_tokenizer(), [])
    recipe = make_recipe(f"model.checkpoint={tmp_path / 'attention'}", STATE_TUNING)
    with pytest.raises(UserError, match=r'kind "learned" needs a recurrent layer'):
        run_recipe(recipe, dry_run=True)


def test_dry_run_shows_the_state_as_a_group(make_recipe: MakeRecipe) -> None:
    summary = run_recipe(make_recipe(override("learned", freeze=False)), dry_run=True)
    assert [group.name for group in summary.groups][-1] == "initial state"
    assert len(summary.groups) > 1 and summary.initial_state is None
    frozen = run_recipe(make_recipe(STATE_TUNING), dry_run=True)
    assert [group.name for group in frozen.groups] == ["initial state"]
    assert "initial state" in frozen.table()
