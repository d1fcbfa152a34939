from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.training.recipe import HandoverRecipe, OptimizerRecipe, Recipe
from longrecall.training.recipe_sources import TextSource
from longrecall.training.recipe_states import INITIAL_STATES, StatePassingRecipe, ZeroState
from longrecall.training.schedule import handover_progress, rate_factor

MINIMAL: dict[str, Any] = {
    "model": {"checkpoint": "base"},
    "data": {"sources": [{"kind": "text", "path": "a.txt"}]},
    "run": {"output": "out", "steps": 100},
}


def test_minimal_recipe_has_the_documented_defaults() -> None:
    recipe = Recipe.from_dict(MINIMAL)
    assert recipe.data.context_length == 512
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.clip) == (0.1, 1.0)
    assert recipe.initial_state.kind == "zero"
    assert recipe.data.sources == (TextSource("a.txt"),)


def test_round_trip_through_plain_data() -> None:
    overrides = ["initial_state.kind=state_passing", "initial_state.clip_norm=3", "data.context_length=4k"]
    recipe = Recipe.from_dict(MINIMAL, overrides)
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("kind", list(INITIAL_STATES))
def test_every_intervention_survives_the_trip_through_plain_data(kind: str) -> None:
    recipe = Recipe.from_dict({**MINIMAL, "initial_state": {"kind": kind, **({"std": 2} if kind == "noise" else {})}})
    assert recipe.initial_state.kind == kind
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe
    assert recipe.continues is (kind == "truncated_bptt")


def test_overrides_are_typed_and_leave_the_data_alone() -> None:
    overrides = [
        "data.context_length=4k",
        "optimizer.learning_rate=3e-3",  # YAML alone would read this as text
        "optimizer.betas=[0.8, 0.9]",
        "data.sources.0.weight=2",
        "initial_state={kind: state_passing, probability: 0.25}",
    ]
    recipe = Recipe.from_dict(MINIMAL, overrides)
    assert recipe.data.context_length == 4096
    assert recipe.optimizer.learning_rate == 0.003
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.data.sources[0].weight == 2.0
    assert recipe.initial_state == StatePassingRecipe(probability=0.25)
    assert Recipe.from_dict(MINIMAL).data.context_length == 512


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rte=1", 'unknown key "optimizer.learning_rte".*Did you mean "learning_rate"'),
        ("optimiser.clip=1", 'unknown key "optimiser".*Did you mean "optimizer"'),
        ("data.sources.0.pth=x", 'unknown key "data.sources.0.pth".*Did you mean "path"'),
        ("data.sources.0.kind=txt", 'data.sources.0.kind "txt" is unknown.*Did you mean "text"'),
        ("initial_state.kind=state_pasing", 'initial_state.kind "state_pasing".*Did you mean "state_passing"'),
        ("initial_state={kind: fited_noise}", 'initial_state.kind "fited_noise".*Did you mean "fitted_noise"'),
        ("initial_state={kind: noise}", '"initial_state.std" is missing'),
        ("initial_state={kind: noise, std: 0}", "initial_state: std must be above 0, got 0"),
        ("initial_state={kind: noise, std: -1}", "initial_state: std must be above 0, got -1"),
        ("initial_state={kind: noise, std: .inf}", "initial_state: std must be above 0, got inf"),
        ("initial_state={kind: noise, std: 1, clip_norm: 3}", 'unknown key "initial_state.clip_norm"'),
        ("initial_state={kind: fitted_noise, average: mean}", 'average "mean" is none of exponential, cumulative'),
        ("initial_state={kind: fitted_noise, decay: 1}", "decay must lie between 0 and 1, got 1"),
        ("initial_state={kind: fitted_noise, clip_norm: 0}", "clip_norm must be above 0, got 0"),
        ("initial_state={kind: state_passing, probability: 1.5}", "probability must be a share between 0 and 1"),
        ("initial_state={kind: truncated_bptt, text_only: true}", 'unknown key "initial_state.text_only"'),
        ("initial_state={kind: learned, learning_rate: 0}", "initial_state: learning_rate must be above 0"),
        ("initial_state={kind: learned, freeze: 1}", "initial_state.freeze must be true or false"),
        ("initial_state={kind: learned, frozen: true}", 'unknown key "initial_state.frozen".*Did you mean "freeze"'),
        ("data.sources.1.weight=2", "data.sources.1 is not an entry of a list of 1"),
        ("data.context_length=1.5k", "data.context_length: length '1.5k'"),
        ("data.context_length=1", "context_length must be between"),
        ("run.steps=0", "run: steps must be above 0"),
        ("run.steps=2.5", "run.steps must be a whole number"),
        ("run.steps=null", "give steps or tokens"),
        ("run.threads=many", "run.threads must be a whole number"),
        ("run.batch_size=true", "run.batch_size must be a whole number"),
        ("run.precision=fp8", 'precision "fp8" is none of'),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number"),
        ("optimizer.learning_rate=.nan", "learning_rate must be above 0"),
        ("optimizer.touched=ten", 'touched "ten" is neither'),
        ("optimizer.touched=-1x", "touched must be above 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas must have 2 entries"),
        ("optimizer.schedule=cosin", 'Did you mean "cosine"'),
        ("optimizer.warmup=500", "warmup"),
        ("handover.start=0.9", "start .* must be below end"),
        ("model.dtype=float16", "float16 cannot be trained"),
        ("data.sources=[]", "sources is empty"),
        ("data.sources=a.txt", "data.sources must be a list"),
        ("data=3", "data must be a mapping"),
        ("run.steps", "write key.subkey=value"),
        ("run.steps.x=1", "run.steps is a single value"),
    ],
)
def test_bad_keys_and_values_are_named(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Recipe.from_dict(MINIMAL, [override])
    assert "\n" not in str(caught.value)


def test_missing_key_is_named() -> None:
    with pytest.raises(UserError, match=r'"model\.checkpoint" is missing'):
        Recipe.from_dict({**MINIMAL, "model": {}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: {checkpoint: x\n", "is not valid YAML"),
        (b"- 1\n", "must hold a mapping"),
        (b"model: !!python/object/apply:os._exit [3]\n", "is not valid YAML"),
        (b"", "must hold a mapping"),
        (b"model: \xff\n", r"not UTF-8 text \(byte 7\)"),
    ],
)
def test_bad_recipe_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        Recipe.load(tmp_path / "r.yaml")


def test_missing_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no recipe"):
        Recipe.load(tmp_path / "none.yaml")


def test_touched_is_a_multiple_or_a_rate() -> None:
    assert OptimizerRecipe(learning_rate=0.002, touched="10x").touched_rate == pytest.approx(0.02, rel=1e-12)
    assert OptimizerRecipe(learning_rate=0.002, touched=0.5).touched_rate == 0.5
    assert OptimizerRecipe(learning_rate=0.002, touched="1e-2").touched_rate == 0.01


def test_an_override_of_the_kind_drops_what_the_recipe_says_of_another_kind() -> None:
    passing = {**MINIMAL, "initial_state": {"kind": "state_passing", "probability": 0.5, "clip_norm": 3.0}}
    assert Recipe.from_dict(passing, ["initial_state.kind=zero"]).initial_state == ZeroState()
    assert Recipe.from_dict(passing, ["initial_state.kind=truncated_bptt"]).initial_state.probability == 0.5
    with pytest.raises(UserError, match=r'unknown key "initial_state\.probability"'):
        Recipe.from_dict(passing, ["initial_state.kind=zero", "initial_state.probability=1"])
    with pytest.raises(UserError, match=r'unknown key "initial_state\.probabilty"'):
        misspelt = {**MINIMAL, "initial_state": {"kind": "state_passing", "probabilty": 0.5}}
        Recipe.from_dict(misspelt, ["initial_state.kind=zero"])


def test_an_override_of_the_length_replaces_the_one_of_the_recipe() -> None:
    by_tokens = {**MINIMAL, "run": {"output": "out", "tokens": "16m"}}
    assert (recipe := Recipe.from_dict(by_tokens, ["run.steps=500"])).steps() == 500 and recipe.run.tokens is None
    recipe = Recipe.from_dict(MINIMAL, ["run.tokens = 1m"])
    assert (recipe.run.steps, recipe.run.tokens) == (None, 1 << 20)
    assert Recipe.from_dict(MINIMAL, ["run.tokens=1m", "run.tokens=none"]).run.steps == 100
    for both in (["run.tokens=1m", "run.steps=5"], ["run={output: out, steps: 5, tokens: 1m}"]):
        with pytest.raises(UserError, match=r"give either steps \(5\) or tokens \(1048576\), not both"):
            Recipe.from_dict(MINIMAL, both)


def test_a_pattern_of_file_names_needs_no_quotes() -> None:
    recipe = Recipe.from_dict(MINIMAL, ["data.sources.0.path=*.txt"])
    assert recipe.data.sources == (TextSource("*.txt"),)


def test_none_is_no_value() -> None:
    overrides = ["run.threads=none", "initial_state={kind: state_passing, clip_norm: none}", "run.report_to=none"]
    recipe = Recipe.from_dict({**MINIMAL, "run": {**MINIMAL["run"], "threads": 3}}, overrides)
    assert recipe.run.threads is None and recipe.initial_state == StatePassingRecipe()
    assert recipe.run.report_to == "none"


def test_tokens_become_whole_steps() -> None:
    recipe = Recipe.from_dict({**MINIMAL, "run": {"output": "o", "tokens": "1m", "batch_size": 48}})
    assert recipe.steps() == -(-(1 << 20) // (48 * 512))
    assert recipe.steps(processes=2) == -(-(1 << 20) // (96 * 512))


@given(
    steps=st.integers(1, 400),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 400).map(float)),
    hold=st.floats(0, 1),
    minimum=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
)
def test_rate_rises_to_the_peak_and_never_rises_again(
    steps: int, warmup: float, hold: float, minimum: float, schedule: str
) -> None:
    recipe = OptimizerRecipe(warmup=warmup, hold=hold, minimum=minimum, schedule=schedule)
    rates = [rate_factor(step, steps, recipe) for step in range(steps)]
    assert all(0 <= rate <= 1 for rate in rates)
    count = min(steps, round(warmup * steps) if warmup < 1 else int(warmup))
    assert all(a < b for a, b in pairwise(rates[:count]))
    # 1e-12: rounding of minimum + (1 - minimum) * x.
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[max(0, count - 1) :]))
    # Past the warm-up the rate ends no lower than the minimum, and the schedule reaches it after the last step.
    if count < steps and int(hold * steps) < steps and schedule != "constant":
        assert rate_factor(steps, steps, recipe) == pytest.approx(minimum, abs=1e-12)


@given(steps=st.integers(1, 300), start=st.floats(0, 0.9), width=st.floats(0.01, 1.0))
def test_handover_is_monotone_and_complete(steps: int, start: float, width: float) -> None:
    recipe = HandoverRecipe(start, min(1.0, start + width))
    values = [handover_progress(step, steps, recipe) for step in range(steps + 1)]
    assert all(0 <= a <= b <= 1 for a, b in pairwise(values))
    assert values[-1] == 1.0
    assert all(v == 0 for step, v in enumerate(values) if step / steps <= start and step < recipe.end * steps)
