from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import MIXERS
from longrecall.sweep.grid import parse_shard, runs_of, shard, sizes
from longrecall.sweep.mixers import DEFAULTS, label, sized
from longrecall.sweep.recipe import SweepRecipe, TaskRecipe
from longrecall.tasks.mad.settings import mad_settings
from longrecall.tasks.published import BASED_TRAINING, RESONA_LENGTHS, MqarSetting

RECIPES = Path(__file__).parents[2] / "recipes" / "sweeps"


def test_cells_grid_and_vary() -> None:
    base = {"a": 1, "b": 2}
    assert TaskRecipe("t", base).all_cells() == (base,)
    assert TaskRecipe("t", base, cells=({"a": 3}, {"b": 4})).all_cells() == ({"a": 3, "b": 2}, {"a": 1, "b": 4})
    grid = TaskRecipe("t", base, grid={"a": [3, 4], "b": [5, 6]}).all_cells()
    assert [tuple(cell.values()) for cell in grid] == [(3, 5), (3, 6), (4, 5), (4, 6)]
    vary = TaskRecipe("t", base, vary={"a": [3, 4], "b": [5]}).all_cells()
    assert [tuple(cell.values()) for cell in vary] == [(1, 2), (3, 2), (4, 2), (1, 5)]
    with pytest.raises(UserError, match="more than one"):
        TaskRecipe("t", cells=({"a": 1},), grid={"a": [1]})


def test_every_combination_is_one_run(tiny: dict[str, Any]) -> None:
    tiny["models"] |= {"hidden_sizes": [8, 16], "layers": [1, 2]}
    tiny["training"] |= {"weight_decays": [0, 0.1], "seeds": [0, 1, 2]}
    tiny["tasks"][0]["grid"] = {"length": [8, 16], "train": [5, 6]}
    runs = runs_of(SweepRecipe.from_dict(tiny))
    assert len(runs) == len({run.key for run in runs}) == 2 * 2 * 2 * 2 * 2 * 3 * 4
    assert {run.train for run in runs} == {5, 6}
    # A cell that is listed twice is trained once.
    tiny["tasks"] *= 2
    assert len(runs_of(SweepRecipe.from_dict(tiny))) == len(runs)


def test_logspace_and_batch_sizes_by_length(tiny: dict[str, Any]) -> None:
    tiny["training"] |= {"learning_rates": {"logspace": [-4, -2, 4]}, "batch_size": {8: 4, 32: 2}}
    training = SweepRecipe.from_dict(tiny).training
    # numpy.logspace(-4, -2, 4); ten to a power is exact to the last digit but one.
    assert training.learning_rates == pytest.approx([1e-4, 4.641588833612782e-4, 2.154434690031882e-3, 1e-2], rel=1e-14)
    assert [training.batch_size_at(length) for length in (4, 8, 9, 32)] == [4, 4, 2, 2]
    with pytest.raises(UserError, match="no entry for a length of 33"):
        training.batch_size_at(33)


def test_a_row_is_known_by_everything_that_decides_its_numbers(tiny: dict[str, Any]) -> None:
    def key(*overrides: str) -> str:
        return runs_of(SweepRecipe.from_dict(tiny, overrides))[0].key

    changes = ("training.epochs=3", "training.seeds=[1]", "data.seed=1", "data.test=9", "training.dropout=0.1")
    changes += ("models.layers=2", "models.mlp=8", "training.batch_size=4", "tasks.0.settings.pairs=1")
    keys = [key(), *(key(change) for change in changes)]
    assert len(set(keys)) == len(keys)
    assert key("run.parallel=3", "run.output=elsewhere.json", "training.learning_rates=[0.003]") == key()
    assert key("run.matmul_precision=high") == key()


def test_sizes_relative_to_the_width() -> None:
    mixer = {"type": "x", "a": "width", "b": "3*width/2", "c": "max(1, width/64)", "d": "min(64, width)", "e": 5}
    nested = {"type": "y", "inner": mixer, "tuple": ["length", 1], "word": "headwise", "label": "name"}
    found = sized(nested, 32, 128)
    assert found["inner"] == {"type": "x", "a": 32, "b": 48, "c": 1, "d": 32, "e": 5}
    assert found["tuple"] == [128, 1] and found["word"] == "headwise" and "label" not in found
    assert sized({"cycle": [{"type": "x"}, {"type": "y", "a": "width"}]}, 8, 8, layer=3) == {"type": "y", "a": 8}
    for wrong in ("width/5", "width//2", "2width", "width/0"):
        with pytest.raises(UserError, match="a: "):
            sized({"type": "x", "a": wrong}, 32)
    assert label({"type": "gla", "num_heads": 2}) == "gla num_heads=2" and label(nested) == "name"


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("width", [32, 256])
def test_default_sizes_can_be_built(name: str, width: int, tiny: dict[str, Any]) -> None:
    tiny["models"] |= {"mixers": [name], "hidden_sizes": [width], "layers": 2}
    parameters, _ = sizes(runs_of(SweepRecipe.from_dict(tiny))[0])
    assert parameters > 16 * width


def test_default_sizes_name_registered_mixers() -> None:
    assert set(DEFAULTS) <= set(MIXERS)


def test_shards_share_the_runs(tiny: dict[str, Any]) -> None:
    runs = runs_of(SweepRecipe.from_dict(tiny, ["training.seeds=[0,1]"]))
    parts = [shard(runs, index, 3) for index in (1, 2, 3)]
    assert sorted(run.key for part in parts for run in part) == sorted(run.key for run in runs)
    assert parse_shard("2/3") == (2, 3)
    for wrong in ("0/3", "4/3", "2", "a/b", "1/0", "-1/2"):
        with pytest.raises(UserError, match="--shard"):
            parse_shard(wrong)


@pytest.mark.parametrize(
    ("recipe", "runs"),
    [
        *(("mqar_smoke", 2), ("mqar_table11", 6 * 3 * 4 * 4 * 4), ("mad_baseline", 6 * 3 * 2 * 3 * 2)),
        *(("mad_full", 396), ("mqar_table11_pooled", 6 * 4 * 4 * 3), ("mqar_table11_hard", 6 * 2 * 4 * 4 * 2)),
        ("mad_four_blocks", 6 * 5 * 9 * 3 * 3 * 2),
    ],
)
def test_shipped_recipes(recipe: str, runs: int) -> None:
    assert len(runs_of(SweepRecipe.load(RECIPES / f"{recipe}.yaml"))) == runs


def test_the_full_mad_recipe_has_the_published_cells() -> None:
    runs = runs_of(SweepRecipe.load(RECIPES / "mad_full.yaml"))
    cells = {(run.task, tuple(sorted(run.settings.items())), run.train) for run in runs}
    assert cells == {(s.task, tuple(sorted(s.settings.items())), s.train) for s in mad_settings()}


def test_the_pooled_recipe_has_the_published_sets_and_blocks() -> None:
    runs = runs_of(SweepRecipe.load(RECIPES / "mqar_table11_pooled.yaml"))
    for run in runs[:1]:
        sets = [MqarSetting(s.settings["length"], s.settings["pairs"], s.rows, 0, True, s.batch_size) for s in run.pool]
        assert sets == list(BASED_TRAINING) and all(part.settings["filler"] for part in (*run.pool, *run.tests))
        assert [(part.settings["length"], part.rows) for part in run.tests] == [(n, 1000) for n in RESONA_LENGTHS]
    blocks = {(run.model.label.partition("+")[0], run.model.norm, run.model.second_norm) for run in runs}
    assert blocks == {(m, "rms", False) if "mamba" in m else (m, "layer", True) for m, _, _ in blocks}
    assert len(blocks) == 6
