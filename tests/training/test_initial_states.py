from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states import StatePassing, Zero, make_initial_state, register
from longrecall.training.initial_states.base import BatchRows
from longrecall.training.recipe_states import StatePassingRecipe, ZeroState
from tests.conftest import MIXERS, RECURRENT

ModelMaker = Callable[..., RecurrentLM]


def tokens(rows: int, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def final_state(model: RecurrentLM, rows: int, seed: int = 0) -> RecurrentState:
    state: RecurrentState = model(tokens(rows, seed=seed)).past_key_values
    return state


def passing(model: RecurrentLM, seed: int = 0, first: int = 0, **options: Any) -> StatePassing:
    return StatePassing(StatePassingRecipe(**options), model, BatchRows(seed, first))


@pytest.mark.parametrize("name", MIXERS)
def test_everything_recurrent_is_passed_and_nothing_else(make_model: ModelMaker, name: str) -> None:
    model = make_model(MIXERS[name])
    initial = passing(model)
    assert initial.before_batch(torch.ones(2, dtype=torch.bool)) is None
    final = final_state(model, 2)
    initial.after_batch(final)
    state = initial.before_batch(torch.ones(2, dtype=torch.bool))
    assert state is not None
    assert state.position.tolist() == [0, 0] and state.length == 0
    empty = model.zero_state(2)
    for key, tensor in state.layers[0].items():
        assert not tensor.requires_grad
        if key.endswith(("recurrent", "conv", "shift")):
            assert torch.equal(tensor, final.layers[0][key])
            assert bool(tensor.any())
        else:
            assert torch.equal(tensor, empty.layers[0][key])
    assert model(tokens(2, seed=1), past_key_values=state).logits.isfinite().all()


@pytest.mark.parametrize("name", [name for name in RECURRENT if not name.startswith("retnet")])
def test_passed_state_is_reading_on(make_model: ModelMaker, name: str) -> None:
    """Without positions, starting from the passed state is reading the two sequences as one."""
    model = make_model(RECURRENT[name]).eval()
    first, second = tokens(2, 7), tokens(2, 5, seed=1)
    initial = passing(model)
    initial.before_batch(torch.ones(2, dtype=torch.bool))
    with torch.no_grad():
        initial.after_batch(model(first).past_key_values)
        continued = model(second, past_key_values=initial.before_batch(torch.ones(2, dtype=torch.bool))).logits
        whole = model(torch.cat([first, second], 1)).logits[:, 7:]
    # float32 sums in another order (chunks of the recurrence); logits are of order 0.1.
    assert torch.allclose(continued, whole, atol=1e-5)


def test_convolution_state_stays_behind_when_asked(make_model: ModelMaker) -> None:
    model = make_model()
    initial = passing(model, convolution=False)
    initial.after_batch(final_state(model, 3))
    state = initial.before_batch(torch.ones(3, dtype=torch.bool))
    assert state is not None
    for layer in state.layers:
        for key, tensor in layer.items():
            assert bool(tensor.any()) is (key == "recurrent")


def test_probability_is_per_row_and_seeded(make_model: ModelMaker) -> None:
    model = make_model()
    final = final_state(model, 40)

    def rows(seed: int = 0, first: int = 0) -> list[bool]:
        initial = passing(model, seed, first, probability=0.5)
        initial.after_batch(final)
        state = initial.before_batch(torch.ones(40, dtype=torch.bool))
        assert state is not None
        alive = [layer["recurrent"].flatten(1).any(1) for layer in state.layers]
        assert torch.equal(alive[0], alive[1])
        kept = state.layers[0]["recurrent"][alive[0]]
        assert torch.equal(kept, final.layers[0]["recurrent"][alive[0]])
        return list(alive[0].tolist())

    assert rows() == rows()
    assert rows() != rows(seed=1) and rows() != rows(first=40)
    # 40 fair draws: mean 20, standard deviation 3.2; the bounds are more than four of them.
    assert 6 < sum(rows()) < 34
    never = passing(model, probability=0.0)
    never.after_batch(final)
    assert never.before_batch(torch.ones(40, dtype=torch.bool)) is None


def test_clip_norm_limits_each_head_and_leaves_small_ones(make_model: ModelMaker) -> None:
    model = make_model()
    final = final_state(model, 2)
    norms = [torch.linalg.vector_norm(layer["recurrent"].detach(), dim=(-2, -1)) for layer in final.layers]
    limit = float(torch.cat([norm.flatten() for norm in norms]).median())
    initial = passing(model, clip_norm=limit)
    initial.after_batch(final)
    state = initial.before_batch(torch.ones(2, dtype=torch.bool))
    assert state is not None
    for before, layer in zip(norms, state.layers, strict=True):
        after = torch.linalg.vector_norm(layer["recurrent"], dim=(-2, -1))
        # 1e-5 relative: one float32 multiplication and the norm of at most 256 numbers.
        torch.testing.assert_close(after, before.clamp(max=limit), rtol=1e-5, atol=0.0)
    assert any(bool((norm > limit).any()) for norm in norms)


def test_another_batch_size_starts_from_zero(make_model: ModelMaker) -> None:
    model = make_model()
    initial = passing(model)
    initial.after_batch(final_state(model, 3))
    assert initial.before_batch(torch.ones(2, dtype=torch.bool)) is None
    assert initial.before_batch(torch.ones(3, dtype=torch.bool)) is not None


def test_state_dict_continues_exactly(make_model: ModelMaker) -> None:
    model = make_model()
    one = passing(model, probability=0.5)
    for seed in range(3):
        one.before_batch(torch.ones(8, dtype=torch.bool))
        one.after_batch(final_state(model, 8, seed))
    other = passing(model, probability=0.5)
    other.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
    for seed in range(4):
        a, b = one.before_batch(torch.ones(8, dtype=torch.bool)), other.before_batch(torch.ones(8, dtype=torch.bool))
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            for x, y in zip(a.layers, b.layers, strict=True):
                assert all(torch.equal(x[name], y[name]) for name in x)
        for initial in (one, other):
            initial.after_batch(final_state(model, 8, 10 + seed))
    fresh = passing(model)
    fresh.load_state_dict(passing(model).state_dict())
    assert fresh.before_batch(torch.ones(2, dtype=torch.bool)) is None


def test_zero_is_plain_training(make_model: ModelMaker) -> None:
    model = make_model()
    initial = make_initial_state(ZeroState(), model, 0, 0)
    initial.after_batch(final_state(model, 2))
    assert initial.before_batch(torch.ones(2, dtype=torch.bool)) is None
    assert initial.state_dict() == {}
    initial.load_state_dict({})


def test_registry_refuses_doubles_and_unknown_kinds(make_model: ModelMaker) -> None:
    with pytest.raises(ValueError, match="ZeroState has an intervention already"):
        register(ZeroState, lambda recipe, model, rows: Zero())

    class Unknown(ZeroState):
        kind = "unknown"

    with pytest.raises(UserError, match='kind "unknown" has no implementation'):
        make_initial_state(Unknown(), make_model(), 0, 0)


def test_carried_state_survives_changes_of_its_source(make_model: ModelMaker) -> None:
    """State is a value: what the caller does to its own state afterwards must not matter, and positions reset."""
    model = make_model()
    final = final_state(model, 2)
    initial = passing(model)
    initial.after_batch(replace(final, position=final.position + 100))
    state = initial.before_batch(torch.ones(2, dtype=torch.bool))
    assert state is not None and state.position.tolist() == [0, 0]


def test_text_only_leaves_sequences_of_tasks_at_zero(make_model: ModelMaker) -> None:
    model = make_model(MIXERS["mamba2"])
    initial = passing(model, text_only=True)
    text = torch.tensor([True, False, True])
    assert initial.before_batch(text) is None
    final = model(torch.randint(0, 200, (3, 9))).past_key_values
    initial.after_batch(final)
    state = initial.before_batch(text)
    assert state is not None
    passed = [bool(state.layers[0]["recurrent"][row].abs().sum() > 0) for row in range(3)]
    assert passed == [True, False, True]
