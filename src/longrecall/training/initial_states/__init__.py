"""Interventions on the initial state: which recurrent state a training batch starts from.

An intervention sees final states go out of the model and says which state goes into the next batch. With data
parallelism every process carries the states of the rows that it reads; what happens to a row depends on its number in
the whole batch alone, so that the number of processes changes nothing. Attention caches are never passed on.
Source: "Understanding and Improving Length Generalization in Recurrent Models" (Buitrago Ruiz and Gu 2025),
interventions 1-4. A new one is one file here, one dataclass in `recipe_states.py` and one `register` line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.initial_states.base import BatchRows, InitialState, is_of_rows, sum_of
from longrecall.training.initial_states.fitted_noise import FittedNoise
from longrecall.training.initial_states.learned import Learned, learned_shapes
from longrecall.training.initial_states.noise import Noise
from longrecall.training.initial_states.state_passing import StatePassing
from longrecall.training.initial_states.truncated_bptt import TruncatedBptt
from longrecall.training.initial_states.zero import Zero
from longrecall.training.recipe_states import (
    AnyInitialState,
    FittedNoiseRecipe,
    LearnedRecipe,
    NoiseRecipe,
    StatePassingRecipe,
    TruncatedBpttRecipe,
    ZeroState,
)

__all__ = [
    "BatchRows",
    "FittedNoise",
    "InitialState",
    "Learned",
    "Noise",
    "StatePassing",
    "TruncatedBptt",
    "Zero",
    "is_of_rows",
    "learned_shapes",
    "make_initial_state",
    "register",
    "sum_of",
]

Maker = Callable[[Any, RecurrentLM, BatchRows], InitialState]
"""(section of the recipe, model, rows of this process) -> intervention."""

_MAKERS: dict[type, Maker] = {}


def register(recipe: type, maker: Maker) -> None:
    """Say how the intervention of a recipe dataclass is made; ValueError (a programming error) when it is known."""
    if recipe in _MAKERS:
        raise ValueError(f"{recipe.__name__} has an intervention already")
    _MAKERS[recipe] = maker


def make_initial_state(
    recipe: AnyInitialState,
    model: RecurrentLM,
    seed: int,
    first_row: int = 0,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> InitialState:
    """Return the intervention that the recipe asks for.

    Args:
        recipe: the section of the recipe.
        model: that is trained.
        seed: of the run.
        first_row: number, in the batch of all processes, of the first row that this process reads.
        add_up: returns the sum of a tensor over all processes; None = this process is alone.

    Raises:
        UserError: the kind has no intervention.
    """
    if type(recipe) not in _MAKERS:
        raise UserError(f'initial_state.kind "{recipe.kind}" has no implementation in this version')
    return _MAKERS[type(recipe)](recipe, model, BatchRows(seed, first_row, add_up))


register(ZeroState, lambda recipe, model, rows: Zero())
register(NoiseRecipe, Noise)
register(FittedNoiseRecipe, FittedNoise)
register(StatePassingRecipe, StatePassing)
register(TruncatedBpttRecipe, TruncatedBptt)
register(LearnedRecipe, Learned)
