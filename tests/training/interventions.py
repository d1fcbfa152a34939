"""Every intervention on the initial state, for tests that run over all of them."""

from __future__ import annotations

from typing import Any

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.initial_states import InitialState, make_initial_state
from longrecall.training.recipe_states import INITIAL_STATES

OPTIONS: dict[str, dict[str, Any]] = {
    "zero": {},
    "noise": {"std": 0.3, "probability": 0.7, "convolution": True},
    "fitted_noise": {"average": "cumulative", "probability": 0.7},
    "state_passing": {"probability": 0.7, "text_only": True},
    "truncated_bptt": {},
    "learned": {"freeze": False, "probability": 0.7},
}
"""Kind -> options that use as much of it as possible."""


def intervene(kind: str, model: RecurrentLM, seed: int = 0, first_row: int = 0, **options: Any) -> InitialState:
    """The intervention of this kind with `OPTIONS`, or with the options given."""
    return make_initial_state(INITIAL_STATES[kind](**(options or OPTIONS[kind])), model, seed, first_row)


def override(kind: str, **options: Any) -> str:
    """The same as a recipe's --set."""
    given = {"kind": kind, **(options or OPTIONS[kind])}
    return "initial_state={" + ", ".join(f"{key}: {str(value).lower()}" for key, value in given.items()) + "}"
