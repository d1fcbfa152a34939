"""Parameters chosen by pattern: what is frozen stays, rates of their own hold, what names nothing is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.training.optimizer import parameter_groups, trained_names
from longrecall.training.recipe import OptimizerRecipe, RateRecipe, Recipe
from longrecall.training.run import run_recipe
from tests.training.interventions import override
from tests.training.runs import Killed, equal, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]
NAMES = [
    "model.embeddings.weight",
    *(f"model.layers.{i}.{part}" for i in (1, 11) for part in ("mixer.k_proj.weight", "mixer.A_log", "norm.weight")),
    "initial_state.0/recurrent",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("train", "freeze", "kept"),
    [
        ([], [], NAMES),
        (["layers.1.*"], [], NAMES[1:4] + NAMES[7:8]),
        (["model.layers.*", "lm_head.weight"], ["*A_log", "*norm*"], [NAMES[1], NAMES[4], *NAMES[7:]]),
        ([], ["layers.*", "*embeddings*"], NAMES[7:]),
    ],
)
def test_patterns_choose_what_is_trained(train: list[str], freeze: list[str], kept: Sequence[str]) -> None:
    """The learned state always is, and layer 1 is not layer 11."""
    assert trained_names(NAMES, OptimizerRecipe(train=tuple(train), freeze=tuple(freeze))) == kept


def test_the_first_rate_that_matches_holds() -> None:
    recipe = OptimizerRecipe(
        learning_rate=0.01,
        touched="3x",
        weight_decay=0.3,
        rates=(
            RateRecipe("*.1.mixer.k_proj.*", "10x"),
            RateRecipe("layers.1.*", 0.5, 0.0),
            RateRecipe("lm_*", None, 0.7),
        ),
    )
    touched = frozenset({NAMES[1], NAMES[2], NAMES[4], NAMES[8]})
    groups = parameter_groups(NAMES, touched, recipe, 0.2)
    assert [(g.name, g.names, g.learning_rate, g.weight_decay) for g in groups] == [
        ("kept, no decay", (NAMES[0], NAMES[5], NAMES[6]), 0.01, 0.0),
        ("touched", (NAMES[4],), 0.03, 0.3),
        ("*.1.mixer.k_proj.*", (NAMES[1],), 0.1, 0.3),
        ("layers.1.*", (NAMES[2], NAMES[3]), 0.5, 0.0),
        ("lm_*, touched", (NAMES[8],), 0.03, 0.7),
        ("initial state", (NAMES[7],), 0.2, 0.0),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.train=[layers.7.*]"], 'optimizer.train.0 "layers.7.*" matches no parameter'),
        (["optimizer.train=[layers.1]"], 'optimizer.train.0 "layers.1" .* Did you mean "layers.1.[*]"'),
        (["optimizer.freeze=['*.k_prj.weight']"], 'Did you mean .*"model.layers.1.mixer.k_proj.weight"'),
        (["optimizer.freeze=['*']"], "optimizer.freeze leaves nothing to train"),
        (["optimizer.freeze=['']"], "optimizer: freeze has an empty pattern"),
        (["optimizer.freeze=layers.1.*"], "optimizer.freeze must be a list"),
        (["optimizer.rates=[{match: x, learning_rate: 10x}]"], 'optimizer.rates.0.match "x" matches no parameter'),
        (["optimizer.rates=[{match: '*'}]"], "optimizer.rates.0: give learning_rate or weight_decay"),
        (["optimizer.rates=[{match: '*', learning_rate: x1}]"], 'rates.0.learning_rate "x1" is neither a multiple'),
        (["optimizer.rates=[{match: '*', learning_rate: 0x}]"], "rates.0.learning_rate must be above 0, got 0x"),
        (["optimizer.rates=[{match: '*', weight_decay: -1}]"], "weight_decay must be 0 or more"),
        (
            ["optimizer.freeze=[layers.1.*]", "optimizer.rates=[{match: layers.1.*, learning_rate: 1}]"],
            "matches no parameter that could be trained",
        ),
        (
            [override("learned", freeze=True), "optimizer.train=[layers.1.*]"],
            "matches no parameter that could be trained",
        ),
    ],
)
def test_what_names_nothing_is_refused(make_recipe: MakeRecipe, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_recipe(make_recipe(*overrides), dry_run=True)
    assert "\n" not in str(caught.value)


CHOSEN = (
    "optimizer.freeze=[layers.0.*, '*embeddings*']",
    "optimizer.rates=[{match: '*.mixer.v_proj.weight', learning_rate: 5x, weight_decay: 0}]",
    "run.gradient_checkpointing=true",
    "run.save_every=2",
    override("learned", freeze=False),
)


def test_a_run_leaves_the_frozen_alone_and_resumes_exactly(
    make_recipe: MakeRecipe, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(*CHOSEN)
    whole = train(recipe)
    before, after = weights(base), weights(Path(recipe.run.output) / "final")
    moved = {name for name in before if not before[name].equal(after[name])}
    frozen = {name for name in before if name.startswith("model.layers.0.") or "embeddings" in name}
    assert moved == before.keys() - frozen
    # No moments of what is frozen: the file holds three tensors of each trained parameter, the learned state's too.
    saved = {
        name.partition("#")[0]
        for name in load_file(Path(recipe.run.output) / "steps/step-00000006/optimizer.safetensors")
    }
    assert {name for name in saved if not name.startswith("initial_state.")} == moved
    assert any(name.startswith("initial_state.") for name in saved)
    again = make_recipe(*CHOSEN, f"run.output={tmp_path / 'killed'}")
    with monkeypatch.context() as patch:
        kill_after(patch, 7)
        with pytest.raises(Killed):
            train(again)
    assert train(again, resume=True) == whole
    assert equal(weights(tmp_path / "killed" / "final"), after)


def test_without_patterns_a_rate_is_the_learning_rate_of_its_group(make_recipe: MakeRecipe) -> None:
    """A rule that says what would hold anyway changes no number."""
    plain = train(make_recipe("optimizer.touched=1x"))
    ruled = make_recipe("optimizer.touched=1x", "optimizer.rates=[{match: 'layers.0.*', learning_rate: 1x}]")
    assert train(ruled, force=True) == plain


def test_the_dry_run_shows_the_groups(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    path = tmp_path / "r.yaml"
    data: dict[str, Any] = make_recipe(*CHOSEN).to_dict()
    path.write_text(yaml.safe_dump(data))
    assert main(["train", str(path), "--dry-run"]) == 0
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["*.mixer.v_proj.weight"][2:] == ["0.05", "0"] and rows["frozen"][2:] == ["0", "0"]
    assert int(rows["*.mixer.v_proj.weight"][0]) == 1
