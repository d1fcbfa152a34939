from __future__ import annotations

from collections.abc import Callable

import pytest

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.optimizer import (
    parameter_groups,
    touched_names,
)
from longrecall.training.recipe import OptimizerRecipe
from tests.conftest import MIXERS

RECIPE = OptimizerRecipe(learning_rate=0.01, touched="10x", weight_decay=0.3)


@pytest.mark.parametrize("name", MIXERS)
def test_only_matrices_decay(make_model: Callable[..., RecurrentLM], name: str) -> None:
    model = make_model(MIXERS[name])
    parameters = dict(model.named_parameters())
    groups = parameter_groups(list(parameters), frozenset(), RECIPE)
    assert sorted(n for group in groups for n in group.names) == sorted(parameters)
    for group in groups:
        for member in group.names:
            projection = member.endswith(
                ("_proj.weight", "_expand.weight", "_encoder.weight", "blend.weight", "_gate_weight")
            )
            low_rank = any(f".{name}_proj." in member for name in ("gk", "f", "g")) and member.endswith("weight")
            matrix = projection or low_rank or member.endswith("router.weight")
            assert (group.weight_decay > 0) is matrix, member


def test_touched_parameters_have_their_own_rate(make_model: Callable[..., RecurrentLM]) -> None:
    second = {"touched": ["model.layers.1.mixer.k_proj.weight", "gone"]}
    records = [{"touched": ["model.layers.0.mixer.A_log"]}, {}, second]
    touched = touched_names(records)
    names = [name for name, _ in make_model().named_parameters()]
    groups = parameter_groups(names, touched, RECIPE)
    rates = {name: (group.learning_rate, group.weight_decay) for group in groups for name in group.names}
    assert rates["model.layers.0.mixer.A_log"] == (pytest.approx(0.1), 0.0)
    assert rates["model.layers.1.mixer.k_proj.weight"] == (pytest.approx(0.1), 0.3)
    assert {rate for name, rate in rates.items() if name not in touched} == {(0.01, 0.3), (0.01, 0.0)}
