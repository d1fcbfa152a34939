"""Whatever stands in a description, it is refused with one line or a model can be built from it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.config import RecurrentConfig
from longrecall.models.value_checks import check_mixer_values, check_number, check_whole
from tests.conftest import MIXERS

VALUES: list[Any] = [
    "x",
    "4",
    -1,
    0,
    1.5,
    None,
    True,
    [],
    {},
    [1, 2, 3],
    math.nan,
    math.inf,
    -math.inf,
    10**30,
    10**400,
]


def plain(value: Any) -> Any:
    return {key: plain(item) for key, item in value.to_dict().items()} if hasattr(value, "to_dict") else value


@pytest.mark.parametrize("name", MIXERS)
def test_no_value_of_a_description_is_a_bug(name: str) -> None:
    full = {key: plain(value) for key, value in mixer_config(MIXERS[name]).to_dict().items()}
    for field, value in itertools.product(full, VALUES):
        description = {**full, field: value}
        try:
            config = RecurrentConfig(hidden_size=32, layers=[{"mixer": description}])
        except UserError as error:
            assert str(error).startswith("layer 0: ") and "\n" not in str(error)
            continue
        assert config.tensor_shapes(), (field, value)
        # Flags stay flags: 1 and "no" are true to Python, and would be written into the next config.json.
        assert full[field] is None or isinstance(value, bool) == isinstance(full[field], bool), (field, value)


@pytest.mark.parametrize("name", ["gla_subheads", "delta_net_grafted"])
def test_no_value_of_an_expansion_is_a_bug(name: str) -> None:
    full: dict[str, Any] = plain(mixer_config(MIXERS[name]).to_dict())["expansion"]
    for field, value in itertools.product(full, VALUES):
        description = {**MIXERS[name], "expansion": {**full, field: value}}
        try:
            found = mixer_config(description).to_dict()["expansion"]
        except UserError as error:
            assert "expansion: " in str(error) and "\n" not in str(error)
            continue
        # None alone stands for another value; what is empty or 0 is no name.
        assert plain(found)[field] == value or value is None, (field, value)


def test_a_model_may_begin_with_zeros() -> None:
    config = RecurrentConfig(hidden_size=32, layers=[{"mixer": MIXERS["gla"]}], initializer_range=0.0)
    assert config.initializer_range == 0
    with pytest.raises(UserError, match=r'^"initializer_range" is -0.1; it must be 0 or more$'):
        RecurrentConfig(hidden_size=32, layers=[{"mixer": MIXERS["gla"]}], initializer_range=-0.1)


def test_every_description_in_use_passes() -> None:
    for description in MIXERS.values():
        check_mixer_values(description)
        check_mixer_values(plain(mixer_config(description)))
    limits = {**MIXERS["mamba2"], "time_step_limit": [0.0, math.inf]}
    check_mixer_values(limits)
    check_mixer_values({**limits, "time_step_limit": (0.001, None)})


@pytest.mark.parametrize("high", [None, math.inf, 1e18, 1e30, 10**30, 10**400])
def test_an_upper_limit_that_no_step_reaches_is_none(high: float | None) -> None:
    (layer,) = RecurrentConfig(
        hidden_size=32, layers=[{"mixer": {**MIXERS["mamba2"], "time_step_limit": [0.0, high]}}]
    ).layers
    assert layer["mixer"]["time_step_limit"] == (0.0, None)
    (again,) = RecurrentConfig(hidden_size=32, layers=[layer]).layers
    assert again == layer


def test_limits_say_what_is_wrong_with_them() -> None:
    with pytest.raises(UserError, match=r"\[1e\+30, None\]; the lower limit must be at most 1e\+18 in size$"):
        check_mixer_values({**MIXERS["mamba2"], "time_step_limit": [1e30, None]})
    with pytest.raises(UserError, match=r"a lower and an upper limit in this order$"):
        check_mixer_values({**MIXERS["mamba2"], "time_step_limit": [0.5, 0.1]})


@pytest.mark.parametrize(
    "limits", ["01", [0.0], [0.0, 1.0, 2.0], [math.nan, 1.0], [0.0, "x"], 3, [True, 1.0], [1, 0.5]]
)
def test_limits_are_two_numbers(limits: object) -> None:
    with pytest.raises(UserError, match=r'^mixer "mamba2": "time_step_limit" is .*; it must be two numbers'):
        check_mixer_values({**MIXERS["mamba2"], "time_step_limit": limits})


def test_mixers_inside_mixers_are_checked_too() -> None:
    with pytest.raises(UserError, match=r'^mixer "gla": "norm_eps" is -1'):
        check_mixer_values({**MIXERS["retrieval"], "base": {**MIXERS["gla"], "norm_eps": -1}})


def test_numbers() -> None:
    for good in (1, 2**31 - 1):
        check_whole("n", good)
    for bad in (0, True, 1.0, "1", None, 2**31):
        with pytest.raises(UserError, match=r'^"n" is '):
            check_whole("n", bad)
    check_whole("n", 0, least=0)
    for value, positive in [(0, False), (-2.5, False), (1e-30, True), (10**18, True)]:
        check_number("x", value, positive=positive)
    for value, positive in [(0, True), (-1e-30, True), (math.nan, False), (math.inf, False), (10**400, False)]:
        with pytest.raises(UserError, match=r'^"x" is .* finite number'):
            check_number("x", value, positive=positive)
